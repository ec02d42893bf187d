"""Entry point of `python -m headway` and of the `headway` command."""

import gc
import os
import sys


def run() -> None:
    """Run the command line, and handle Ctrl-C, SIGTERM and SIGHUP even during imports."""
    gc.disable()  # until the subcommand is imported
    try:
        import signal  # after `sys.path` is safe

        from headway.ipc import signals

        # a process inherits the signals that the thread which started it had blocked
        handled = (*signals.PREEMPTION_SIGNALS, signal.SIGUSR2, signal.SIGQUIT)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) == signal.SIG_DFL:
                signals.trap(signals.exit_on_signal, number)
        from headway.commands.main import run_command
    except KeyboardInterrupt:
        from headway.ipc.stderr import log

        log("interrupted")
        os._exit(130)
    run_command()


if __name__ == "__main__":
    if not getattr(sys.flags, "safe_path", False):
        # as for the `headway` command: files in the working directory must not shadow modules
        sys.path[0] = os.path.dirname(sys.executable)
    run()
