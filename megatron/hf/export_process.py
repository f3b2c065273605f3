"""The process beside a training that exports one of its checkpoints (--export-hf-interval)."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import NoReturn

from megatron.processes.parent_process import become_helper
from megatron.processes.process_name import name_process

MAX_SHARD_BYTES = 5_000_000_000  # hf-convert's default
STORAGE_FAILED = 3
"""The exit status after an OSError, such as of a full disk."""
REFUSED = 2
"""That for what another try would meet again."""
_LOWEST_PRIORITY = 19  # of the processor: the training comes first


def main(parent: int, save: str, tag: str, out: str, run_id: str, generation: int) -> NoReturn:
    """The process; see `export`."""
    sys.exit(export(parent, save, tag, out, run_id, generation))


def export(parent: int, save: str, tag: str, out: str, run_id: str, generation: int) -> int:
    """Export the checkpoint `tag` of `save` to `out`; the exit status of hf-convert, or STORAGE_FAILED. Ends with the
    process `parent`.

    `run_id`: of the run that saves to `save`; `generation`: of its launch. What exports of this launch and of earlier
    ones have left in the directory of `out` is removed.
    """
    become_helper(parent)
    name_process("hf-export")
    os.setpriority(os.PRIO_PROCESS, 0, _LOWEST_PRIORITY)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
    from megatron.checkpointing.engines.errors import CheckpointError
    from megatron.fileio.new_directory import remove_unfinished
    from megatron.hf.errors import ConversionError
    from megatron.hf.exporting import export_for_run
    from megatron.hf.source import owner_of

    try:
        remove_unfinished(Path(out).parent, owner_of(run_id, Path(save), Path(out).parent), generation)
        print(export_for_run(Path(save), Path(out), tag, MAX_SHARD_BYTES, run_id, generation))
    except (ConversionError, CheckpointError) as error:
        print(error)
        return REFUSED
    except OSError as error:
        print(error)
        return STORAGE_FAILED
    except Exception as error:
        logging.debug("the export failed", exc_info=True)
        print(f"{type(error).__name__}: {error}")
        return 1
    return 0
