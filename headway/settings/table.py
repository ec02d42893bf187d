"""The declarations of all settings: type, default, choices and help.

Flags, profile keys, variables, `--help` and messages are derived from them. The attributes of
`Settings` are the table; an instance contains resolved values with their origins. The launch path
avoids dataclasses: importing them takes a fifth of a launch's time budget.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from headway.devices.table import OF_CLUSTERS, extensions, is_kind
from headway.ipc.choices import PRECISIONS, STRATEGIES, read_wrap
from headway.ipc.origin import Layer, Origin
from headway.ipc.run_contract import DEVICES
from headway.machine.devices import ALL, DeviceSpec, parse_devices
from headway.settings.setting import (
    AUTO,
    Choice,
    Count,
    Hosts,
    MachineCount,
    Machines,
    Scope,
    Seconds,
    Setting,
    Value,
    read_host,
    read_hosts,
    read_options,
    read_path,
    read_ranks,
    read_variables,
)

YES, NO = "yes", "no"
_YES_OR_NO = {"true": YES, "on": YES, "false": NO, "off": NO}

ON, OFF, NODE = "on", "off", "node"
_ON_OR_OFF = {"true": ON, "yes": ON, "false": OFF, "no": OFF}

NO_CLUSTER = "none"  # same as numbering.ALONE, which launches outside clusters do not import
CLUSTERS = ("torchrun", "mpi", "slurm", "kubernetes", "skypilot", "ranked", "lightning")
"""The kinds of clusters whose variables are read."""

LINES, RAW = "lines", "raw"
"""Values of `output`."""

OF_JOBS = ("sbatch", "snapshot")
"""Settings that apply only to scheduler jobs."""

OF_MACHINES = ("num_machines", "machine_rank", "main_address", "main_port")
"""Settings for this machine's position in a multi-node run, which may be unknown before the run."""


def _switch(help: str, *, applies_to: Scope | None = None) -> Setting[str]:
    return Setting(Choice(YES, NO, same=_YES_OR_NO), NO, help, bare=YES, applies_to=applies_to)


class Settings:
    """The table of all settings; an instance contains their resolved values."""

    device = Setting(
        Choice(AUTO, *DEVICES, accepts=is_kind),
        AUTO,
        "device to run on; gpu is cuda, xpu, or mps on a Mac",
    )
    devices: Setting[DeviceSpec] = Setting(
        parse_devices,
        ALL,
        "GPUs to use: a count (2), a list (0,2 or 0-3), UUIDs, idle:2, or all",
        metavar="SPEC",
        example="0,",
        shape="list",
        applies_to="gpus",
    )
    num_processes = Setting(
        Count(1),
        AUTO,
        "processes on this machine: a number, or auto (one per GPU, or one without GPUs)",
        metavar="N",
        example="2",
    )
    mixed_precision = Setting(
        # YAML tools may rewrite an unquoted `no` as false or off
        Choice(*PRECISIONS, same={"false": "no", "off": "no"}),
        "no",
        "precision of the forward pass",
        applies_to="accelerator",
    )
    gradient_accumulation_steps = Setting(
        Count(1), 1, "micro-batches per optimizer step", metavar="N", applies_to="accelerator"
    )
    strategy = Setting(
        Choice(AUTO, *STRATEGIES),
        AUTO,
        "parallelism: replicate the model (ddp), shard its parameters (fsdp), or shard over "
        "shard_size ranks and replicate the shards (hsdp); auto is ddp",
        applies_to="ranks",
    )
    shard_size: Setting[int | None] = Setting(
        Count(2),
        None,
        "with hsdp: number of ranks that share a copy of the model (default: ranks per machine)",
        metavar="N",
        example="8",
        applies_to="hsdp",
    )
    wrap: Setting[str] = Setting(
        read_wrap,
        AUTO,
        "units of fsdp, hsdp and activation_checkpointing: the model's repeated blocks (auto), "
        "modules of these classes (Block,Head), or modules with at least this many parameters "
        "(1000000)",
        metavar="auto|CLASSES|N",
        shape="list",
        applies_to="blocks",
    )
    activation_checkpointing = _switch(
        "recompute the activations of each block in the backward pass instead of storing them",
        applies_to="accelerator",
    )
    cpu_offload = _switch(
        "with fsdp and hsdp: keep parameters, gradients and optimizer states in CPU memory",
        applies_to="shards",
    )
    replace_accelerate = _switch(
        "provide Headway's runtime to code that imports accelerate, so that strategy, wrap and "
        "exact errors apply to transformers' Trainer, TRL and diffusers' scripts"
    )
    threads_per_process = Setting(
        Count(1),
        AUTO,
        "CPU threads per process: a number, or auto (physical cores / processes)",
        metavar="N",
    )
    num_machines: Setting[Machines] = Setting(
        MachineCount(1),
        AUTO,
        "machines in this run: a number, a range (2:4) within which machines may join or leave, or "
        "auto (from the cluster's variables, else 1)",
        metavar="M",
    )
    machine_rank: Setting[int | None] = Setting(
        Count(0),
        AUTO,
        "rank of this machine, from 0 (auto: from the cluster's variables, else assigned at the "
        "rendezvous; the machine with main_address is 0)",
        metavar="R",
    )
    main_address: Setting[str | None] = Setting(
        read_host,
        AUTO,
        "host name or IP address of machine 0, without a port (auto: from the cluster's variables)",
        metavar="HOST",
        example="HOST",
        applies_to="machines",
    )
    main_port: Setting[int | None] = Setting(
        Count(1, 65535),
        AUTO,
        "port on machine 0 (auto: from the cluster's variables, else 29500; on one machine any "
        "free port)",
        metavar="PORT",
        applies_to="machines",
    )
    cluster = Setting(
        Choice(AUTO, NO_CLUSTER, *CLUSTERS, accepts=lambda name: name in extensions(OF_CLUSTERS)),
        AUTO,
        "cluster whose variables define the run's machines: any scheduler or mpirun that is "
        "detected (auto), only the named one, or none",
    )
    machine_timeout_s = Setting(
        Seconds(3, 86400),
        15,
        "seconds without a heartbeat from another machine's launcher after which the machine is "
        "considered lost, and the run stops or continues without it",
        metavar="S",
        applies_to="machines",
        has_flag=False,
    )
    max_restarts = Setting(
        Count(0),
        0,
        "maximum number of restarts of all processes, on all machines, after a failure",
        metavar="N",
        example="3",
        needs_launcher=True,
    )
    restart_anyway = _switch(
        "restart even if the same failure occurs twice in a row, instead of stopping the run with "
        "exit code 76",
        applies_to="launcher",
    )
    restart_delay = Setting(
        Seconds(0, 60),
        1,
        "seconds before a restart if the failed attempt made no progress; doubled after each such "
        "failure, up to 60",
        metavar="S",
        applies_to="launcher",
        has_flag=False,
    )
    grace_period_s = Setting(
        Seconds(0, 86400),
        30,
        "seconds between the stop signal and SIGKILL for the ranks; if not set, at most 5 after "
        "the failure of another rank. After a success, it is the time limit for processes that "
        "the ranks left running",
        metavar="S",
        applies_to="launcher",
    )
    hang_timeout: Setting[int | None] = Setting(
        Seconds(1),
        None,
        "stop the run and print the stacks of all ranks after this many seconds without progress "
        "(600, or 10m)",
        metavar="S",
        example="600",
        needs_launcher=True,
    )
    resume: Setting[str | None] = Setting(
        read_path,
        None,
        "checkpoint that accelerator.resume(), or a library's Trainer, resumes from: latest (the "
        "newest in the project or output folder; error if there is none), if-any (the newest, if "
        "there is one), or the path of a checkpoint or of such a folder",
        metavar="PATH",
        example="latest",
    )
    time_limit: Setting[int | None] = Setting(
        Seconds(1),
        None,
        "save and exit with code 75 this many seconds after the launch (600, or 3h55m); for "
        "scripts that call accelerator.checkpoint() or use a library's Trainer",
        metavar="S",
        example="3h55m",
    )
    library_hooks = Setting(
        Choice(YES, NO, same=_YES_OR_NO),
        YES,
        "hook into the Trainer of transformers or Lightning so that it saves and exits when the "
        "job is preempted",
        has_flag=False,
    )
    status = Setting(
        Choice(AUTO, OFF, same={"no": OFF, "false": OFF}),
        AUTO,
        "progress of the run: a status line on a terminal, else a line per minute (auto); or off",
        applies_to="launcher",
        has_flag=False,
    )
    log_dir: Setting[str | None] = Setting(
        read_path, None, "folder for one log file per process", metavar="DIR", needs_launcher=True
    )
    ranks: Setting[tuple[int, ...] | None] = Setting(
        read_ranks,
        None,
        "ranks to show on the console: 0,3 or 0-3 or all",
        metavar="0,3",
        shape="list",
        applies_to="launcher",
    )
    output = Setting(
        Choice(LINES, RAW),
        LINES,
        "format of the ranks' output: whole lines prefixed with the rank (lines), with progress "
        "bars reduced to a line every 10 s in files; or unchanged bytes (raw)",
        applies_to="launcher",
    )
    record = Setting(
        Choice(ON, OFF, same=_ON_OR_OFF),
        ON,
        "keep a record of the run below your state folder, for `headway runs`, `headway why` and "
        "`headway logs`",
    )
    debug_rank: Setting[int | None] = Setting(
        Count(0),
        None,
        "rank to attach to the terminal for breakpoint() and pdb, without a log file; other ranks' "
        "output is hidden, and torch's default timeouts are disabled, but not those that the "
        "script sets. Ctrl-C interrupts the rank; pressed twice within a second, it stops the run",
        metavar="R",
        example="0",
    )
    numa_binding = Setting(
        Choice(NODE, OFF, same={"no": OFF, "false": OFF}),
        OFF,
        "pin each rank to the cores of its GPU's NUMA node (node), or do not pin it (off)",
        needs_launcher=True,
    )
    start_method = Setting(
        Choice(AUTO, "fork", "exec"),
        AUTO,
        "method to start ranks: fork a process that has imported torch (fork), or start a new "
        "interpreter for each rank (exec)",
        applies_to="launcher",
        has_flag=False,
    )
    hosts: Setting[Hosts | None] = Setting(
        read_hosts,
        None,
        "hosts to run on, over ssh; a:2 is host a with 2 processes; none: only this machine",
        metavar="a,b:2",
        shape="list",
    )
    sbatch: Setting[dict[str, str]] = Setting(
        read_options,
        {},
        "with --submit slurm: options of sbatch, such as 'partition=gpu time=2h exclusive'",
        metavar="KEY=VALUE",
        shape="map",
        example="partition=gpu",
    )
    snapshot = Setting(
        Choice(ON, OFF, same=_ON_OR_OFF),
        ON,
        "with --submit: run a copy of all files that git does not ignore, made at submission (on), "
        "or run the code as it is when the job starts (off)",
        has_flag=False,
    )
    env: Setting[dict[str, str]] = Setting(
        read_variables,
        {},
        "environment variables to set for the script",
        metavar="NAME=VALUE",
        shape="map",
    )

    def __init__(self, values: Mapping[str, Value], invalid: Collection[str] = ()) -> None:
        """Store `values`; the values of settings in `invalid` are placeholders."""
        self.values = values
        self.invalid = invalid

    def without_secrets(self) -> Settings:
        """Return the settings with secrets in `env` masked, for display."""
        from headway.ipc.secrets import masked_map

        env = self.values["env"]
        return Settings(
            {**self.values, "env": env._replace(value=masked_map(env.value))}, self.invalid
        )

    def origin(self, name: str) -> Origin:
        return self.values[name].origin

    def where(self, *names: str) -> str:
        return "; ".join(f"{name}: {self.origin(name)}" for name in names)

    def are_user_set(self, *names: str) -> bool:
        return all(self.origin(name).is_user_set for name in names)

    def is_overridden(self, name: str, by: str) -> bool:
        """Return whether the layer that sets `by` overrides the layer that sets `name`."""
        return Layer.DETECTED < self.origin(name).layer < self.origin(by).layer <= Layer.FLAG


TABLE: Mapping[str, Setting[Any]] = {
    name: row for name, row in vars(Settings).items() if isinstance(row, Setting)
}

TOPICS: Mapping[str, tuple[str, ...]] = {
    "device": ("device", "devices"),
    "ranks on this machine": (
        *("num_processes", "threads_per_process", "numa_binding", "start_method", "env"),
    ),
    "training": (
        *("mixed_precision", "gradient_accumulation_steps", "resume", "replace_accelerate"),
    ),
    "model parallelism": (
        *("strategy", "shard_size", "wrap", "activation_checkpointing", "cpu_offload"),
    ),
    "several machines": (*OF_MACHINES, "cluster", "hosts", "machine_timeout_s"),
    "failures and stopping": (
        *("max_restarts", "restart_anyway", "restart_delay", "hang_timeout", "time_limit"),
        *("grace_period_s", "library_hooks"),
    ),
    "output": ("output", "ranks", "status", "log_dir", "record", "debug_rank"),
    "jobs": OF_JOBS,
}
"""The headings of `--help` and the settings in each section."""
