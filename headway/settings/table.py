"""Every setting, declared once: type, default, choices, help; flags, profile keys, environment
names, `--help` and messages are derived from it.

`Settings` is both the table (its class attributes) and, as an instance, one resolved set of typed
values, each with its origin. No dataclasses here or elsewhere on the launch path: importing them
takes a fifth of the time that a whole launch may take.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from headway.devices.table import OF_CLUSTERS, extensions, is_kind
from headway.ipc.choices import PRECISIONS, STRATEGIES, read_wrap
from headway.ipc.origin import Layer, Origin
from headway.ipc.run_contract import DEVICES
from headway.machine.devices import ALL, DeviceSpec, parse_devices
from headway.settings.setting import (
    AUTO,
    Choice,
    Count,
    MachineCount,
    Machines,
    Obeyer,
    Raw,
    Seconds,
    Setting,
    Value,
    read_options,
    read_path,
    read_ranks,
    read_variables,
)

if TYPE_CHECKING:
    from headway.settings.hosts import Hosts

YES, NO = "yes", "no"
_YES_OR_NO = {"true": YES, "on": YES, "false": NO, "off": NO}

ON, OFF, NODE = "on", "off", "node"
_ON_OR_OFF = {"true": ON, "yes": ON, "false": OFF, "no": OFF}

NO_CLUSTER = "none"  # numbering.ALONE, which a launch outside of clusters does not import
CLUSTERS = ("torchrun", "mpi", "slurm", "kubernetes", "skypilot", "ranked")
"""The kinds of clusters whose variables are read, and the value for reading none."""

LINES, RAW = "lines", "raw"
"""How the ranks' output is shown."""

OF_JOBS = ("sbatch", "snapshot")
"""Settings that only a job of a scheduler obeys."""

OF_MACHINES = ("num_machines", "machine_rank", "main_address", "main_port")
"""Settings that say which machine of a run this is; not known before the run is there."""


def _switch(help: str, *, obeyed_by: Obeyer | None = None) -> Setting[str]:
    choice = Choice(YES, NO, same=_YES_OR_NO)
    return Setting(choice, NO, help, bare=YES, obeyed_by=obeyed_by)


def _host(raw: Raw) -> str:
    from headway.settings.hosts import read_host  # few launches name a host

    return read_host(raw)


def _hosts(raw: Raw) -> Hosts:
    from headway.settings.hosts import read_hosts

    return read_hosts(raw)


class Settings:
    """The table of all settings; an instance holds one resolved value for each."""

    device = Setting(
        Choice(*DEVICES, or_auto=True, accepts=is_kind),
        AUTO,
        "device to run on; gpu is cuda, xpu, or mps on a Mac",
    )
    devices: Setting[DeviceSpec] = Setting(
        parse_devices,
        ALL,
        "which GPUs: a count (2), a list (0,2 or 0-3), UUIDs, idle:2, or all",
        metavar="SPEC",
        example="0,",
        shape="list",
        obeyed_by="gpus",
    )
    num_processes = Setting(
        Count(1),
        AUTO,
        "processes on this machine: a number, or auto (one for each GPU, else one)",
        metavar="N",
        example="2",
    )
    mixed_precision = Setting(
        # false and off are how YAML tools write the unquoted `no` back
        Choice(*PRECISIONS, same={"false": "no", "off": "no"}),
        "no",
        "precision of the forward pass",
        obeyed_by="accelerator",
    )
    gradient_accumulation_steps = Setting(
        Count(1), 1, "micro-batches for each optimizer step", metavar="N", obeyed_by="accelerator"
    )
    strategy = Setting(
        Choice(*STRATEGIES, or_auto=True),
        AUTO,
        "how ranks share a model: a copy each (ddp), a part of each parameter (fsdp), or parts on "
        "shard_size ranks, and copies of those (hsdp); auto is ddp",
        obeyed_by="ranks",
    )
    shard_size: Setting[int | None] = Setting(
        Count(2),
        None,
        "ranks that hold the parts of one copy of the model, with hsdp; by default those of one "
        "machine",
        metavar="N",
        example="8",
        obeyed_by="hsdp",
    )
    wrap: Setting[str] = Setting(
        read_wrap,
        AUTO,
        "what is gathered at a time with fsdp and hsdp, and computed again with "
        "activation_checkpointing: the model's repeated blocks (auto), modules of these classes "
        "(Block,Head), or with so many parameters (1000000)",
        metavar="auto|CLASSES|N",
        shape="list",
        obeyed_by="blocks",
    )
    activation_checkpointing = _switch(
        "compute the activations of each block again in the backward pass, instead of keeping them",
        obeyed_by="accelerator",
    )
    cpu_offload = _switch(
        "with fsdp and hsdp: keep parameters, gradients and optimizer states in the memory of the "
        "CPU",
        obeyed_by="shards",
    )
    replace_accelerate = _switch(
        "give a script and its libraries that import accelerate Headway's runtime instead: strategy"
        ", wrap and exact errors then hold in transformers' Trainer, TRL and diffusers' scripts"
    )
    threads_per_process = Setting(
        Count(1),
        AUTO,
        "CPU threads of each process: a number, or auto (physical cores / processes)",
        metavar="N",
    )
    num_machines: Setting[Machines] = Setting(
        MachineCount(1),
        AUTO,
        "machines in this run: a number, a range (2:4) of which some may come later or be lost, or "
        "auto (from the cluster's variables, else 1)",
        metavar="M",
    )
    machine_rank: Setting[int | None] = Setting(
        Count(0),
        AUTO,
        "rank of this machine, from 0 (auto: from the cluster's variables, else given when the "
        "machines meet, and 0 to the one that has main_address)",
        metavar="R",
    )
    main_address: Setting[str | None] = Setting(
        _host,
        AUTO,
        "host name or IP address of machine 0, without a port (auto: from the cluster's variables)",
        metavar="HOST",
        obeyed_by="machines",
    )
    main_port: Setting[int | None] = Setting(
        Count(1, 65535),
        AUTO,
        "port on machine 0 (auto: from the cluster's variables, else 29500; on one machine any "
        "free port)",
        metavar="PORT",
        obeyed_by="machines",
    )
    cluster = Setting(
        Choice(
            NO_CLUSTER,
            *CLUSTERS,
            or_auto=True,
            accepts=lambda name: name in extensions(OF_CLUSTERS),
        ),
        AUTO,
        "whose variables say which machines belong to the run: of the scheduler or of mpirun, "
        "where there are any (auto), of the named one alone, or of none",
    )
    machine_timeout_s = Setting(
        Seconds(3, 86400),
        15,
        "seconds without a sign of life from another machine's launcher, after which that machine "
        "is lost, and the run ends or goes on without it",
        metavar="S",
        obeyed_by="machines",
        has_flag=False,
    )
    max_restarts = Setting(
        Count(0),
        0,
        "how often to restart all processes, on all machines, after a failure",
        metavar="N",
        example="3",
        needs_launcher=True,
    )
    restart_anyway = _switch(
        "restart also after a failure that is the one before it again, which otherwise ends the "
        "run with exit code 76",
        obeyed_by="launcher",
    )
    restart_delay = Setting(
        Seconds(0, 60),
        1,
        "seconds before a restart if the failed attempt made no progress; doubled with each such "
        "failure, up to 60",
        metavar="S",
        obeyed_by="launcher",
        has_flag=False,
    )
    grace_period_s = Setting(
        Seconds(0, 86400),
        30,
        "seconds that ranks have to stop after the stop signal, before they are killed; unless "
        "set, 5 at most for those that stop because another one failed. After a success, how long "
        "to wait for processes that the ranks have left",
        metavar="S",
        obeyed_by="launcher",
    )
    hang_timeout: Setting[int | None] = Setting(
        Seconds(1),
        None,
        "end the run, with the stacks of all ranks, after this many seconds without progress "
        "(600, or 10m)",
        metavar="S",
        example="600",
        needs_launcher=True,
    )
    resume: Setting[str | None] = Setting(
        read_path,
        None,
        "checkpoint that the script's accelerator.resume(), or the Trainer of a library, goes on "
        "from: latest (of the project's or its output folder, which must have one), if-any (the "
        "same, but the beginning where there is none), or the path of one or of such a folder",
        metavar="PATH",
        example="latest",
    )
    time_limit: Setting[int | None] = Setting(
        Seconds(1),
        None,
        "save and leave with exit code 75 so many seconds after the launch (600, or 3h55m); for "
        "scripts that call accelerator.checkpoint() or train with the Trainer of a library",
        metavar="S",
        example="3h55m",
    )
    library_hooks = Setting(
        Choice(YES, NO, same=_YES_OR_NO),
        YES,
        "join the Trainer of transformers or Lightning when the script imports it, so that it "
        "saves and exits when the job has to stop; no leaves it alone",
        has_flag=False,
    )
    status = Setting(
        Choice(OFF, same={"no": OFF, "false": OFF}, or_auto=True),
        AUTO,
        "how the run is doing, where ranks tell of optimizer steps: a line below the output of a "
        "terminal, and elsewhere one each minute (auto); or off",
        obeyed_by="launcher",
    )
    log_dir: Setting[str | None] = Setting(
        read_path, None, "folder for one log file per process", metavar="DIR", needs_launcher=True
    )
    ranks: Setting[tuple[int, ...] | None] = Setting(
        read_ranks,
        None,
        "ranks whose output is shown on the console: 0,3 or 0-3 or all",
        metavar="0,3",
        shape="list",
        obeyed_by="launcher",
    )
    output = Setting(
        Choice(LINES, RAW),
        LINES,
        "what ranks print: whole lines that start with the rank (lines), where a progress bar in "
        "a file is a line every 10 s; or every byte as it comes (raw)",
        obeyed_by="launcher",
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
        "rank that gets the terminal and no log file, for breakpoint() and pdb; the others' output "
        "is hidden, and torch's default timeouts are disabled, but not those that the script sets. "
        "Ctrl-C interrupts the rank; twice within a second, it ends the run",
        metavar="R",
        example="0",
    )
    numa_binding = Setting(
        Choice(NODE, OFF, same={"no": OFF, "false": OFF}),
        OFF,
        "run each rank on the cores of its GPU's NUMA node only (node), or where Linux likes (off)",
        needs_launcher=True,
    )
    start_method = Setting(
        Choice("fork", "exec", or_auto=True),
        AUTO,
        "how ranks start: forked from a process that has imported torch (fork), or each in a new "
        "interpreter (exec)",
        obeyed_by="launcher",
        has_flag=False,
    )
    hosts: Setting[Hosts | None] = Setting(
        _hosts,
        None,
        "run on these hosts, over ssh from here; a:2 is host a with 2 processes; none: only here",
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
        "with --submit: run a copy of the code as it is now, of what git tracks or does not "
        "ignore (on), or what is there when the job starts (off)",
        has_flag=False,
    )
    env: Setting[dict[str, str]] = Setting(
        read_variables,
        {},
        "environment variable to set for the script",
        metavar="NAME=VALUE",
        shape="map",
    )

    def __init__(self, values: Mapping[str, Value], unread: Collection[str] = ()) -> None:
        """Store `values`; those of the settings in `unread` are placeholders for invalid values."""
        self.values = values
        self.unread = unread

    def without_secrets(self) -> Settings:
        """Return the settings with the secrets in `env` masked, to be shown."""
        from headway.ipc.secrets import masked_map

        env = self.values["env"]
        return Settings(
            {**self.values, "env": env._replace(value=masked_map(env.value))}, self.unread
        )

    def origin(self, name: str) -> Origin:
        return self.values[name].origin

    def where(self, *names: str) -> str:
        return "; ".join(f"{name}: {self.origin(name)}" for name in names)

    def are_user_set(self, *names: str) -> bool:
        return all(self.origin(name).is_user_set for name in names)

    def is_overridden(self, name: str, by: str) -> bool:
        """Return whether `by` was set in a layer of higher precedence than `name`."""
        return Layer.DETECTED < self.origin(name).layer < self.origin(by).layer <= Layer.FLAG


TABLE: Mapping[str, Setting[Any]] = {
    name: row for name, row in vars(Settings).items() if isinstance(row, Setting)
}

TOPICS: Mapping[str, tuple[str, ...]] = {
    "device": ("device", "devices"),
    "ranks on this machine": (
        "num_processes",
        "threads_per_process",
        "numa_binding",
        "start_method",
        "env",
    ),
    "training": (
        *("mixed_precision", "gradient_accumulation_steps", "resume", "replace_accelerate"),
    ),
    "sharing the model out": (
        *("strategy", "shard_size", "wrap", "activation_checkpointing", "cpu_offload"),
    ),
    "several machines": (*OF_MACHINES, "cluster", "hosts", "machine_timeout_s"),
    "failing and stopping": (
        *("max_restarts", "restart_anyway", "restart_delay", "hang_timeout", "time_limit"),
        *("grace_period_s", "library_hooks"),
    ),
    "output": ("output", "ranks", "status", "log_dir", "record", "debug_rank"),
    "jobs": OF_JOBS,
}
"""The headings of `--help`, and the settings below each."""
