"""`headway launch --hosts a,b:2`: run the launch on other hosts over ssh."""

from __future__ import annotations

import os
import secrets
import shlex

from headway.commands.flags import Parsed
from headway.commands.remote_job import RemoteJob, check_everywhere, job_args
from headway.errors import Code, ConfigError
from headway.ipc.secrets import masked_command
from headway.launcher.plan.program import Program, interpreter
from headway.settings.setting import AUTO, Hosts
from headway.settings.table import TABLE, Settings

_AGENT = "headway.commands.host_agent"
_STOP_MARGIN_S = 15  # added to the grace period, for the launcher to exit
_HERE = {*("--dry-run", "--show-secrets"), *("hosts", "num_machines", "main_address", "main_port")}
"""Flags and settings that are used only here, and are not passed to the hosts' launches."""


def launch_over_ssh(request: RemoteJob, hosts: Hosts, settings: Settings) -> int:
    """Run the launch on the hosts, in the order of machine ranks, and return its exit code.

    Raises ConfigError for an error that every machine would report, and LaunchError if a host
    cannot be reached or cannot run the launch.
    """
    parsed, own, program, layers, machine, environ = request
    _reject_contradictions(parsed, hosts, settings, program)
    check_everywhere(layers, machine)

    def words(rank: int, address: str, port: int) -> list[str]:
        flags = {**_place(rank, len(hosts), address, port), "hosts": str(Hosts())}
        if hosts[rank].num_processes is not None:
            flags["num_processes"] = str(hosts[rank].num_processes)
        ours = [f"{TABLE[name].flag}={value}" for name, value in flags.items()]
        quiet = ["--quiet"] * (rank > 0 and not parsed.quiet)
        return [*ours, *quiet, *job_args(own, program, {*_HERE, *flags})]

    if parsed.dry_run:
        address = settings.main_address or hosts[0].name
        for rank, host in enumerate(hosts):
            shown = words(rank, address, settings.main_port or 0)
            shown = shown if parsed.show_secrets else masked_command(shown)
            print(f"{host.name}: headway launch {shlex.join(shown)}")
        return 0
    from headway.launcher.remote.protocol import AgentSetup, forwarded_env
    from headway.launcher.remote.ssh import RemoteLaunch, run_on_hosts

    order = AgentSetup(
        mark=secrets.token_hex(16),
        folder=os.getcwd(),
        script=program.name if program.kind == "script" else None,
        variables=forwarded_env(environ),
    )
    path = environ.get("PYTHONPATH")  # the agent may need it to find Headway
    python_path = ["env", f"PYTHONPATH={path}"] if path else []
    launch = RemoteLaunch(
        hosts=hosts,
        agent=[*python_path, *interpreter(), "-m", _AGENT],
        setup=order,
        words=words,
        main_address=settings.main_address if settings.are_user_set("main_address") else None,
        main_port=settings.main_port if settings.are_user_set("main_port") else None,
        stops_within_s=settings.grace_period_s + _STOP_MARGIN_S,
    )
    return run_on_hosts(launch)


def _place(rank: int, count: int, address: str, port: int) -> dict[str, str]:
    if count == 1:
        return {"num_machines": "1"}
    return {
        "num_machines": str(count),
        "machine_rank": str(rank),
        "main_address": address,
        "main_port": str(port) if port else AUTO,
    }


def _reject_contradictions(
    parsed: Parsed, hosts: Hosts, settings: Settings, program: Program
) -> None:
    """Reject settings that contradict the hosts, and flags that work only on this machine."""
    where = settings.where("hosts")
    is_counted = settings.are_user_set("num_machines") and settings.num_machines != len(hosts)
    own = {"--machine-rank": parsed.machine_rank, "--in-process": parsed.in_process or None}
    given = [flag for flag, value in own.items() if value is not None]
    if is_counted and settings.origin("num_machines").is_for_this_launch:
        what = f"num_machines is {settings.num_machines}, but there are {len(hosts)} hosts"
        where, fix = f"{settings.where('num_machines')}; {where}", "remove num_machines"
    elif given:
        what = f"{given[0]} is only for launches on this machine, but hosts is {hosts}"
        fix = f"remove {given[0]}, or pass --hosts none"
    elif program.is_stream:
        what = f"the script {program.name!r} is a pipe, which other hosts cannot read"
        fix = "save the script to a file"
    else:
        return
    raise ConfigError(what, where=where, fix=fix, code=Code.FLAGS_CONTRADICT)
