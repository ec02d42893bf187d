"""`python -m headway`: the same as the `headway` command."""

import os
import sys

if __name__ == "__main__":
    if not getattr(sys.flags, "safe_path", False):
        # as for the command: no file of the working folder shadows a module
        sys.path[0] = os.path.dirname(sys.executable)
    from headway.commands.main import run_command

    run_command()
