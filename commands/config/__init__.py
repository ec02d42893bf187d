"""`headway config` and the subcommands that show and change profiles. Only `exchange` and the
dispatcher import from here.
"""
