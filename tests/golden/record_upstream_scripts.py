"""Records with which arguments upstream's shell scripts run pretrain_gpt.py: writes upstream_scripts.json.

    python tests/golden/record_upstream_scripts.py PATH_OF_MEGATRON_DEEPSPEED tests/golden/upstream_scripts.json

Counted are the scripts (*.sh) that run pretrain_gpt.py with arguments of their own: 60 files mention it, and five of
these are left out, since they only hand arguments on: two sbatch wrappers, two that call another script of the
list, and SRUN.sh of examples/sc21, whose arguments come from its environment.

Method: each script runs under bash in an empty directory, with a PATH that has nothing but text tools and stand-ins
for launchers, which write down what they are given and start nothing. Shell variables so get the values that the
script itself gives them; what the user is to fill in (<PATH>, positional arguments, environment, GPUs) has a plausible
value below. A job has the processes that its script asks for, else 8 nodes of 8 GPUs.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_HAND_ON = (
    "examples/sc21/SRUN.sh",
    "examples_deepspeed/curriculum_learning/ds_train.sh",
    "examples_deepspeed/data_efficiency/gpt/pretrain/ds_pretrain_gpt_1.3B_dense_run.sh",
    "tests/functional_tests/test_scripts/gpt3/sbatch_gpt3_distributed_resume_checkpoint_test.sh",
    "tests/functional_tests/test_scripts/gpt3/sbatch_gpt3_distributed_test.sh",
)
_POSITIONAL = {
    "ds_pretrain_gpt2.sh": "baseline baseline 1558 1.5e-4 512 1024 1 1234 5000 600000 157286400000 157286400000 3000 "
    "false 0 0",
    "ds_pretrain_gpt_1.3B_dense_base_script.sh": "2.0e-4 300",
    "pretrain_gpt3_distributed_test.sh": "/data/text_document /ckpt /tb 0 1 1 1 100",
    "pretrain_gpt3_distributed_resume_checkpoint_test.sh": "/data/text_document /ckpt /tb 1 1 1",
}
# Their batches of 2 have no use for more than 2 replicas, of TP 8 or of 4 ranks for each sequence.
_GPUS = {
    "pretrain_gpt_1.3B_seq_parallel.sh": 16,
    "ds_pretrain_gpt_1.3B_seq_parallel_32k.sh": 8,
    "ds_pretrain_gpt_30B_seq_parallel_32k.sh": 8,
}
_ENVIRONMENT = {
    "HOSTNAME": "host",
    # tools/retro/examples reads these from files that the user writes
    "RETRO_WORKDIR": "/retro",
    "RETRO_GPT_TRAIN_SAMPLES": "192000000",
    "LR_DECAY_SAMPLES": "166400000",
    "LR_WARMUP_SAMPLES": "162761",
    "RETRO_GPT_EVAL_INTERVAL": "2000",
    "RETRO_GPT_EVAL_ITERS": "100",
    "GPT_VOCAB_FILE": "/data/vocab.json",
    "GPT_MERGE_FILE": "/data/merges.txt",
    "DATALOADER_TYPE": "single",
    "DATA_BLEND": "/data/text_document",
    "RETRO_ENV_VARS": "/dev/null",
    "DATA_BLEND_SCRIPT": "/dev/null",
    "VOCAB_PATH": "/data/vocab.json",
    "MERGE_PATH": "/data/merges.txt",
    "DATA_PATH": "/data/text_document",
}
_TOOLS = ("bash", "sh", "cat", "sed", "wc", "dirname", "basename", "realpath", "env", "grep", "awk", "tr", "head")
_LAUNCHER = """#!{python}
import json, os, re, shlex, sys
words = sys.argv[1:]
at = next((i for i, word in enumerate(words) if word.endswith("pretrain_gpt.py")), None)
if at is not None:
    text = " ".join(words[:at]).replace("=", " ")
    def of(name, default):
        found = re.search(name + r" +(\\d+)", text)
        return int(found[1]) if found else default
    here = of("--nproc_per_node", 0) or of("--num_gpus", 0)
    nodes = of("--nnodes", 0) or of("--num_nodes", 0)
    names = ("SBATCH_RANKS", "NUM_GPUS", "num_gpus", "GPUS")
    asked = next(os.environ[name] for name in names if os.environ.get(name))
    alone = 1 if sys.argv[0].endswith("torchrun") else 8  # the launchers' own defaults
    ranks = (here or alone) * (nodes or 1) if here or nodes or alone == 1 else int(asked)
    with open(os.environ["RECORD"], "a") as out:
        out.write(json.dumps([ranks, shlex.join(words[at + 1:])]) + "\\n")
"""
_STAND_INS = {
    "srun": '#!/bin/sh\nfor last; do :; done\nexec sh -c "$last"\n',
    "ds_ssh": "#!/bin/sh\ni=0; while [ $i -lt $((GPUS + 2)) ]; do echo x; i=$((i+1)); done\n",
    "nvidia-smi": "#!/bin/sh\ni=0; while [ $i -lt 8 ]; do echo x; i=$((i+1)); done\n",
    "ssh": "#!/bin/sh\nexit 1\n",
    "date": "#!/bin/sh\necho 2023.01.01\n",
    "whoami": "#!/bin/sh\necho user\n",
    "hostname": "#!/bin/sh\necho host\n",
    "tee": "#!/bin/sh\nexec cat\n",
} | dict.fromkeys(("mkdir", "wget", "rm", "cp", "pip", "git", "usage"), "#!/bin/sh\nexit 0\n")


def counted(root: Path) -> list[str]:
    """Paths, relative to `root`, of the scripts that run pretrain_gpt.py with arguments of their own."""
    scripts = [path for path in sorted(root.rglob("*.sh")) if "pretrain_gpt" in path.read_text()]
    mention = [path.relative_to(root).as_posix() for path in scripts]
    return [path for path in mention if path not in _HAND_ON]


def _prepare(text: str) -> str:
    """The script without redirections of the run's output, and with what stands in <...> filled in."""
    lines = text.replace("\\\n", "\x00").split("\n")
    for i, line in enumerate(lines):
        if "pretrain_gpt.py" in line:
            lines[i] = re.sub(r"(&>>?|2>&1 *\||2>&1)[^\"]*", "", line)
    text = "\n".join(lines).replace("\x00", "\\\n")
    return re.sub(r"(?<!<)<([A-Za-z][A-Za-z0-9 .-]*)>", lambda found: "/" + found[1].replace(" ", "_").lower(), text)


def record(root: Path, script: str) -> list[tuple[int, str]]:
    """(number of ranks, arguments) of every launch of `script`."""
    with tempfile.TemporaryDirectory() as scratch:
        place, tools = Path(scratch, "run"), Path(scratch, "bin")
        for folder in ("tmp", "dataset"):  # taken to be there
            Path(place, folder).mkdir(parents=True)
        tools.mkdir()
        for name in _TOOLS:
            (tools / name).symlink_to(shutil.which(name) or name)
        launchers = dict.fromkeys(("deepspeed", "torchrun", "python"), _LAUNCHER.format(python=sys.executable))
        for name, body in (_STAND_INS | launchers).items():
            (tools / name).write_text(body)
            (tools / name).chmod(0o755)
        for sibling in (root / script).parent.iterdir():
            if sibling.is_file():
                (place / sibling.name).write_bytes(sibling.read_bytes())
        text = (root / script).read_text()
        mine = place / Path(script).name
        mine.write_text(_prepare(text))
        slurm = re.search(r"#SBATCH.*--nodes=(\d+).*--ntasks-per-node=(\d+)", text)
        env = _ENVIRONMENT | {"PATH": str(tools), "RECORD": str(Path(scratch, "record")), "HOME": str(place)}
        env["GPUS"] = str(_GPUS.get(mine.name, 64))
        if slurm:
            env["SBATCH_RANKS"] = str(int(slurm[1]) * int(slurm[2]))
        # -a exports what the script sets, so that the stand-ins see its number of GPUs
        finished = subprocess.run(
            ["bash", "-a", str(mine), *_POSITIONAL.get(mine.name, "").split()],
            cwd=place, env=env, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        found = Path(scratch, "record")
        if not found.exists():
            raise SystemExit(f"{script} ran nothing:\n{finished.stdout[-500:]}{finished.stderr[-1500:]}")
        return [json.loads(line) for line in found.read_text().replace(str(place), "/run").splitlines()]


def main() -> None:
    root, target = Path(sys.argv[1]), Path(sys.argv[2])
    runs = {script: record(root, script) for script in counted(root)}
    lines = [f"{json.dumps(script)}: {json.dumps(launches)}" for script, launches in runs.items()]
    target.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{len(runs)} scripts, {sum(map(len, runs.values()))} launches", file=sys.stderr)


if __name__ == "__main__":
    os.umask(0o077)
    main()
