"""How the questions are worded."""

from __future__ import annotations

PLACE, MORE, FINISH = "place", "more", "finish"
"""The questions that are not settings: which profile to write, ask more?, what to do with it."""

TEXTS = {
    "device": "Where should scripts run?",
    "num_processes": "How many processes on this machine?",
    "mixed_precision": "Which precision?",
    "partition": "Which partition for jobs of --submit slurm?",
    "time": "How long may a job take? (2h, 1d12h)",
    "hostfile": "Run on the machines of a hostfile, over ssh?",
    PLACE: "Where to keep the profile?",
    MORE: "More settings?",
    "devices": "Which GPUs?",
    "gradient_accumulation_steps": "How many micro-batches for each optimizer step?",
    "threads_per_process": "How many CPU threads for each process?",
    "max_restarts": "How many restarts after a failure?",
    "log_dir": "A folder for log files?",
    "env": "Extra environment variables? (A=1 B=2)",
    "num_machines": "How many machines in a run?",
    "strategy": "How should ranks share a model?",
    "shard_size": "How many ranks for one copy of the model?",
    "activation_checkpointing": "Compute activations again in the backward pass?",
    "wrap": "Which modules are gathered at a time?",
    "cpu_offload": "Keep parameters on the CPU?",
    "main_address": "The name or IP address of machine 0?",
    "machine_rank": "Which of them is this one, from 0?",
    "main_port": "Which port on machine 0?",
    FINISH: "What now?",
}
