"""Records how the restart study trained: writes study.json.

    python tests/golden/record_study.py PATH_OF_LLM_RESTART_PERF tests/golden/study.json

The study is https://github.com/mauryaavinash95/llm-restart-perf (read at 0d21211). Its submit-job.sh gives
config-n-run.sh the sizes of a model; that writes DeepSpeed's JSON with the stanza of checkpoint approach -c 0..7 and
runs pretrain_gpt.py. Both run here as they are, under a HOME of their own, with what they call replaced by programs
that write down what they are given and do nothing. Paths of the study's machines stand below /study.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

MODELS = (3, 7, 13, 33, 70)
APPROACHES = range(8)
HOST_CACHE_GIB = 20  # what submit-job.sh gives approaches 3, 4 and 7
_TOOLS = ("bash", "cat", "wc", "sed", "date", "awk", "mkdir", "tee", "ls", "du")
_NOTE = '#!/bin/sh\nprintf "%s\\n" "$*" >>"$RECORD"\n'
_NOTHING = "#!/bin/sh\nexit 0\n"


def _scripts(source: Path, home: Path) -> Path:
    """The study's scripts, with the paths of its machines under `home`; returns their directory."""
    place = home / "dl-io" / "vlcc-datastates"
    for folder in (place, home / "dl-io" / "DeepSpeed", home / "bin"):
        folder.mkdir(parents=True)
    for name in ("config-n-run.sh", "submit-job.sh"):
        text = re.sub(r"/(eagle|vast)/[\w/]*?/scratch", f"{home}/scratch", (source / name).read_text())
        (place / name).write_text(text)
    for name in _TOOLS:
        (home / "bin" / name).symlink_to(shutil.which(name) or name)
    for name, body in {"deepspeed": _NOTE, "pdsh": _NOTHING, "rm": _NOTHING, "dlconda": _NOTHING}.items():
        (home / "bin" / name).write_text(body)
        (home / "bin" / name).chmod(0o755)
    (home / ".bash_profile").touch()
    return place


def _run(script: Path, home: Path, nodes: int, *arguments: str, **environment: str) -> list[str]:
    """What was written down while the script ran, a line for each call."""
    nodefile, record = home / "nodes", home / "record"
    nodefile.write_text("".join(f"node{i}\n" for i in range(nodes)))
    record.unlink(missing_ok=True)
    env = {"PATH": str(home / "bin"), "HOME": str(home), "PBS_NODEFILE": str(nodefile), "RECORD": str(record)}
    done = subprocess.run(
        ["bash", str(script), *arguments], cwd=home, env=env | environment, capture_output=True, text=True, timeout=300
    )
    if not record.exists():
        raise SystemExit(f"{script.name} ran nothing:\n{done.stdout[-500:]}{done.stderr[-1500:]}")
    return record.read_text().splitlines()


def sizes_of_models(source: Path) -> dict[int, list[str]]:
    """Model -> what submit-job.sh gives config-n-run.sh after -c and -h."""
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        place = _scripts(source, home)
        (place / "config-n-run.sh").write_text(_NOTE)
        found = {}
        for model in MODELS:
            words = shlex.split(_run(place / "submit-job.sh", home, 1, MODELS=str(model))[0])
            found[model] = words[words.index("-m") :]
        return found


def run_of(source: Path, sizes: list[str], approach: int) -> tuple[str, str]:
    """(arguments of pretrain_gpt.py, the content of ds_config.json) of one approach."""
    cache = HOST_CACHE_GIB if approach in (3, 4, 7) else 0
    nodes = int(sizes[sizes.index("-P") + 1])
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        script = _scripts(source, home) / "config-n-run.sh"
        (launch,) = _run(script, home, nodes, "-c", str(approach), "-h", str(cache), *sizes)
        (config,) = home.rglob("ds_config.json")
        arguments = launch.partition("pretrain_gpt.py ")[2]
        return " ".join(arguments.split()).replace(str(home), "/study"), config.read_text()


def main() -> None:
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    runs: dict[int, str] = {}
    files: dict[int, object] = {}
    for model, sizes in sizes_of_models(source).items():
        for approach in APPROACHES:
            runs_as, file = run_of(source, sizes, approach)
            if runs.setdefault(model, runs_as) != runs_as or files.setdefault(approach, json.loads(file)) != json.loads(
                file
            ):
                raise SystemExit(f"model {model}, approach {approach}: not as the others; record each by itself")
    lines = [f'"{model}": {json.dumps(line)}' for model, line in runs.items()]
    stanzas = [f'"{approach}": {json.dumps(file)}' for approach, file in files.items()]
    join = ",\n".join
    target.write_text(f'{{"command_lines": {{\n{join(lines)}\n}}, "deepspeed_configs": {{\n{join(stanzas)}\n}}}}\n')


if __name__ == "__main__":
    main()
