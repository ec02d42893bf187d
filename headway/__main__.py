"""`python -m headway`: the same as the `headway` command."""

from headway.commands.main import run_command

if __name__ == "__main__":
    run_command()
