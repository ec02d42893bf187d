"""`headway checkpoint ls|verify|prune|export`: list, verify, remove and export checkpoints.

Only export needs torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from headway.checkpoint.folders import FOLDER as PROJECT_FOLDER
from headway.checkpoint.folders import (
    candidates,
    checkpoints_in,
    listed_in,
    prune,
    recover,
    resolve_checkpoint,
)
from headway.checkpoint.manifest import NAME, Manifest, unlisted_files, verify
from headway.commands.flags import Parser
from headway.commands.tables import print_table, when
from headway.errors import CheckpointError, Code
from headway.ipc.paths import is_absent
from headway.ipc.stderr import log, shown, size

ACTIONS = ("ls", "verify", "prune", "export")
_ACTION_OF_FLAG = {"keep": "prune", "model": "export"}
_ACTIONS = """
ls [FOLDER]        list the checkpoints in a folder or its `checkpoints` subfolder, newest last, and
                   whether each is complete, incomplete or unreadable, judging by its file sizes
verify FOLDER ...  verify the checksums of all files, for a checkpoint or for all checkpoints in a
                   folder; exit with 1 if a checkpoint is damaged
prune FOLDER       remove all but the newest --keep checkpoints
export FOLDER OUT.safetensors
                   write the weights of a model to a single file; for a project's folder, from its
                   newest checkpoint
"""


def main(argv: Sequence[str]) -> int:
    parser = make_parser()
    parsed, words = parser.parse_words(argv)
    if not words or words[0] not in ACTIONS:
        parser.error(f"headway checkpoint requires one of {', '.join(ACTIONS)}")
    action, folders = words[0], [Path(word) for word in words[1:]]
    for flag, its in _ACTION_OF_FLAG.items():
        if getattr(parsed, flag) and action != its:
            parser.error(f"--{flag} applies to {its}, not to {action}")
    if action == "verify":
        return _verify([path for word in folders or [Path(".")] for path in _checkpoints_in(word)])
    if action == "export":
        if len(folders) != 2 or folders[1].suffix != ".safetensors":
            parser.error("export requires two paths: a checkpoint, and OUT.safetensors to write")
        checkpoint, out = folders
        return _export(checkpoint, out, _number("--model", parsed.model, parser))
    if len(folders) > 1:
        parser.error(f"unexpected argument {words[2]!r}")
    folder = _checkpoint_folder(folders[0] if folders else Path("."))
    if action == "ls":
        return _list(folder)
    keep = _number("--keep", parsed.keep, parser)
    if not folders or not keep:
        parser.error("prune requires a folder, and --keep with the number of checkpoints to keep")
    return _prune(folder, keep)


def _number(flag: str, text: str | None, parser: Parser) -> int | None:
    if text is not None and not text.isdecimal():
        parser.error(f"invalid value {text!r} for {flag}: not an integer")
    return None if text is None else int(text)


def make_parser() -> Parser:
    parser = Parser(
        "checkpoint",
        "List, verify, remove and export the checkpoints of accelerator.save_state().",
        usage=f"headway checkpoint {'|'.join(ACTIONS)} [--keep N] [--model N] [FOLDER ...]",
        appendix=_ACTIONS,
    )
    parser.flag("--keep", metavar="N", help="for prune: number of checkpoints to keep, 1 or more")
    parser.flag(
        "--model",
        metavar="N",
        help="for export: index of the model, in the order of prepare(), if there are several",
    )
    return parser


def _checkpoint_folder(folder: Path) -> Path:
    """Return the folder of the checkpoints: `folder` or, if it is a project, its subfolder."""
    if is_absent(folder):
        raise CheckpointError(
            "the folder does not exist",
            where=shown(str(folder)),
            fix="pass the project_dir of the Accelerator, or the folder that it saves to",
            code=Code.NO_CHECKPOINT,
        )
    below = folder / PROJECT_FOLDER
    has_own = any(not found.path.is_symlink() for found in checkpoints_in(folder))
    return folder if is_absent(below) or has_own else below


def _checkpoints_in(folder: Path) -> list[Path]:
    """Return `folder` if it is a checkpoint; otherwise, the checkpoints that it contains."""
    if not is_absent(folder / NAME):
        return [folder]
    return [candidate.path for candidate in candidates(folder)] or [folder]


def _list(folder: Path) -> int:
    found = listed_in(folder)
    head = ("checkpoint", "state", "step", "epoch", "ranks", "size", "saved")
    rows = [(shown(item.path.name), item.state, *_cells(item.manifest)) for item in found]
    print_table(head, rows)
    if not found:
        log(f"no checkpoints in {shown(str(folder))}")
    return 0


def _cells(manifest: Manifest | None) -> tuple[str, ...]:
    if manifest is None:
        return ("-",) * 5
    return (
        str(manifest.step),
        str(manifest.epoch),
        str(manifest.world_size),
        size(sum(file.size for file in manifest.files)),
        when(manifest.saved_at),
    )


def _verify(folders: Sequence[Path]) -> int:
    exit_code = 0
    for folder in folders:
        try:
            recover(folder)
            manifest = verify(folder)
            others = unlisted_files(folder, manifest)
        except (CheckpointError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            exit_code = CheckpointError.exit_code
            continue
        print(f"{shown(str(folder))}: ok, {len(manifest.files)} files of step {manifest.step}")
        for path in others:
            print(f"{shown(str(folder))}: {shown(path)} is not in the manifest")
    return exit_code


def _prune(folder: Path, keep: int) -> int:
    gone = prune(folder, keep)
    for path in gone:
        if gone[path]:
            print(f"removed {shown(str(path))}")
    if stayed := [path for path, is_gone in gone.items() if not is_gone]:
        raise CheckpointError(
            f"{len(stayed)} folders, such as {stayed[0].name}, could not be removed",
            where=str(folder),
            fix="run this command as a user with write access to the folder",
            code=Code.UNWRITABLE,
        )
    return 0


def _export(folder: Path, out: Path, number: int | None) -> int:
    from headway.checkpoint.files import save
    from headway.checkpoint.loading import weights_in

    checkpoint = resolve_checkpoint(folder)
    tensors, others = weights_in(checkpoint, number)
    try:
        save(tensors, out, safe_serialization=True)
    except OSError as error:
        raise CheckpointError(
            f"the weights cannot be written: {error.strerror}",
            where=str(out),
            fix="pass a file in an existing, writable folder",
            code=Code.UNWRITABLE,
        ) from None
    print(f"{shown(str(out))}: {len(tensors)} tensors from {shown(str(checkpoint))}")
    for name in others:
        print(f"{shown(name)} is not a tensor and was skipped")
    return 0
