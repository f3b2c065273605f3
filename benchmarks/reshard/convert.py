"""The process that converts a checkpoint by DeepSpeed's ds_to_universal: `convert.py SOURCE TARGET PARENT`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

from megatron.processes.parent_process import end_with_parent


def main(source: str, target: str, parent: int) -> None:
    """Convert the checkpoint in `source` into `target`, which is made; ends with the process `parent`.

    The last line of standard output is JSON: seconds of imports and of the conversion.
    """
    began = time.monotonic()
    end_with_parent(parent)
    from deepspeed.checkpoint import ds_to_universal

    os.register_at_fork(after_in_child=end_with_parent)  # its pools' processes, when this one is killed
    ready = time.monotonic()
    arguments = argparse.Namespace(
        input_folder=source,
        output_folder=target,
        num_extract_workers=4,  # DeepSpeed's defaults
        num_merge_workers=2,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=False,
    )
    ds_to_universal.main(arguments)
    print(json.dumps({"imports_s": ready - began, "conversion_s": time.monotonic() - ready}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
