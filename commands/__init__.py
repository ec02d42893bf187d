"""The subcommands of `headway`, one module each."""
