"""Jobs of others, traced as they are: same losses and files as untraced, and what the trace says of them is true."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron.net.free_port import free_port
from restart_trace.mounts import mount_of
from restart_trace.reading import read_records
from restart_trace.schema import check_record
from tests.dist.harness import HANGS_S, LLAMA_STYLE, ROOT, Run, Zygote, records
from tests.dist.job_table import check_row, covered, enough, note_agreement, sizes
from tests.dist.tiny_runs import NO_DROPOUT
from tools.ckpt_analysis.ingest.load import load_trace
from tools.ckpt_analysis.render.json_output import to_dict
from tools.ckpt_analysis.report import Report, analyse

SCRIPTS = Path(__file__).parent / "scripts" / "clients"
LEAN = {"PYTHONPATH": f"{SCRIPTS.parent / 'lean'}{os.pathsep}{ROOT}"}  # half of the imports, which are not the subject
RANKS = 2
# name -> script and arguments, its saves and its loads that find a checkpoint
CLIENTS = {
    "ordinary": (["plain_deepspeed.py", "ordinary", "2"], 1, 1),
    "pipeline": (["plain_deepspeed.py", "pipeline", "2"], 1, 1),
    "trainer3": (["hf_trainer.py", "2", "3"], 2, 2),
    "trainer": (["hf_trainer.py", "2", "1"], 2, 2),  # the states of its random generators are a load by themselves
    "accelerate": (["accelerate_loop.py", "2"], 1, 1),
}


@dataclass(frozen=True)
class Pair:
    """A client's run without hooks, and one with them."""

    client: str
    plain: Run
    traced: Run
    directory: Path

    @property
    def trace_dir(self) -> Path:
        return self.directory / "trace"

    def report(self) -> Report:
        return analyse(load_trace(self.trace_dir)).report


@pytest.fixture(scope="module")
def clients() -> Iterator[Zygote]:
    """Forks ranks that need not import the libraries that they are clients of."""
    started = Zygote.start(imports=("transformers.trainer", "transformers.models.llama.modeling_llama", "accelerate"))
    yield started
    started.close()


def run_client(zygote: Zygote, name: str, directory: Path, trace_dir: Path | None, **env: str) -> Run:
    script, *arguments = CLIENTS[name][0]
    directory.mkdir(parents=True)
    words = [str(directory), str(trace_dir or "-"), str(SCRIPTS / script), *arguments]
    environment = {"LOCAL_SIZE": str(RANKS), **env}
    return zygote.run(words, RANKS, directory.parent / "logs", env=environment, script=str(SCRIPTS / "hooked.py"))


# In the suite DeepSpeed's own engine is traced under torchrun, and beside an untraced run where a hook raises, both
# below; Accelerate's loop under its own launcher; the Trainer with ZeRO-3, which saves more.
NIGHTLY = ("ordinary", "accelerate", "trainer")


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.nightly(minutes=1) if name in NIGHTLY else ()) for name in CLIENTS],
)
def pair(request: pytest.FixtureRequest, clients: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    directory = tmp_path_factory.mktemp(request.param)
    plain = run_client(clients, request.param, directory / "plain", None)
    assert plain.ok, plain.output[-3000:]
    traced = run_client(clients, request.param, directory / "traced", directory / "trace")
    assert traced.ok, traced.output[-3000:]
    return Pair(request.param, plain, traced, directory)


def losses(run: Run) -> list[str]:
    found = [re.findall(r"^step \d+ loss .*$", run.log(rank), re.MULTILINE) for rank in range(RANKS)]
    assert found[0] and found[1]
    return found[0] + found[1]


def lines(run: Run) -> list[set[str]]:
    """The lines that each rank printed, without what two runs have differently: numbers, how often a line comes, and
    progress bars, which are drawn again and filled up by the time that passes."""
    return [
        {
            re.sub(r"\d[\d.,e:+-]*", "#", line)
            for line in run.log(rank).splitlines()
            if not re.search(r" loss |%\|", line)
        }
        for rank in range(RANKS)
    ]


def files(directory: Path) -> dict[str, bytes]:
    found = {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}
    assert found
    return found


def operations(trace_dir: Path, kind: str) -> list[list[dict[str, Any]]]:
    """The completed records of every operation of this kind that moved bytes, rank by rank."""
    found = []
    for path in sorted(trace_dir.glob("rank_*.jsonl")):
        by_op: dict[int, list[dict[str, Any]]] = {}
        for record in read_records(path):
            if record.get("operation") == kind and "op" in record:
                by_op.setdefault(record["op"], []).append(record)
        found += [rows for rows in by_op.values() if rows[-1].get("bytes")]
    return found


def test_losses_output_and_files_are_the_same(pair: Pair) -> None:
    assert losses(pair.plain) == losses(pair.traced)
    assert lines(pair.plain) == lines(pair.traced)
    plain, traced = files(pair.directory / "plain"), files(pair.directory / "traced")
    assert plain.keys() == traced.keys()
    assert [name for name in plain if plain[name] != traced[name]] == []


def test_no_hook_was_switched_off(pair: Pair) -> None:
    assert "switched off" not in pair.traced.output and "restart_trace:" not in pair.traced.output


@pytest.fixture(scope="module")
def shares(pair: Pair, clients: Zygote) -> list[float | None]:
    """Of the time of all saves, and of all loads, what their phases cover over the ranks.

    An operation takes 30 to 100 ms here, so that a rank that waits for a core between two calls costs it several
    percent: then another run is looked at. A call that is not hooked costs it a third and more, every time.
    """
    trace_dir = pair.trace_dir
    for attempt in range(4):
        found = [covered(trace_dir, kind, 1) for kind in ("save", "load")]
        if enough(found):
            break
        again = pair.directory / f"again{attempt}"
        trace_dir = again / "trace"
        assert run_client(clients, pair.client, again / "traced", trace_dir).ok
    return found


def test_saves_and_loads_are_covered(shares: list[float | None]) -> None:
    """By their phases, at least 95 %."""
    assert enough(shares), shares


def test_saves_and_loads_end_well(pair: Pair) -> None:
    _, saves, loads = CLIENTS[pair.client]
    found = {kind: operations(pair.trace_dir, kind) for kind in ("save", "load")}
    assert {kind: len(those) for kind, those in found.items()} == {"save": RANKS * saves, "load": RANKS * loads}
    every = found["save"] + found["load"]
    assert all(rows[-1]["type"] == "operation_end" and rows[-1]["outcome"] == "ok" for rows in every)


def test_what_is_seen_is_the_row_of_the_table(pair: Pair, shares: list[float | None]) -> None:
    """And saves and loads, each within the client's own clock, are all that it makes."""
    report = to_dict(pair.report())
    place = next((pair.directory / "traced").rglob(report["saves"][-1]["tag"]))
    if pair.client.startswith("trainer"):  # which has DeepSpeed save below what it writes itself
        place = place.parent
    logs = [[pair.traced.log(rank) for rank in range(RANKS)]]
    check_row(" ".join(CLIENTS[pair.client][0]), pair.trace_dir, logs, report, sum(sizes(place)), shares)


def test_phases_do_not_overlap(pair: Pair) -> None:
    """Spans of one window share it; the time of all is at most that of the operation. But for what is not blocking: the
    look-up of a name beside the rendezvous.
    """
    for kind in ("save", "load", "startup"):
        for path in sorted(pair.trace_dir.glob("rank_*.jsonl")):
            spans = [r for r in read_records(path) if r["type"] == "span" and r["operation"] == kind]
            assert {span["phase"] for span in spans if not span["blocking"]} <= {"name_lookup"}
            spans = [span for span in spans if span["phase"] != "caught_up" and span["blocking"]]
            windows = sorted({(s["op"], s["start_ns"], s["end_ns"]) for s in spans})
            for window, after in zip(windows, windows[1:], strict=False):
                assert window[0] != after[0] or window[2] <= after[1]
            for op, start, end in windows:
                inside = [s["duration_ns"] for s in spans if (s["op"], s["start_ns"], s["end_ns"]) == (op, start, end)]
                assert sum(inside) <= end - start


def test_bytes_are_those_of_the_files(pair: Pair) -> None:
    """Of each of DeepSpeed's files that is saved; and no file that a rank saved is missing."""
    sizes = {p.name: p.stat().st_size for p in (pair.directory / "traced").rglob("*.pt")}
    written: dict[str, int] = {}
    for rows in operations(pair.trace_dir, "save"):
        for row in rows:
            if row["type"] == "span" and row["phase"] == "flush":
                written[Path(row["file"]).name] = row["bytes"]
    assert {name: size for name, size in written.items() if name.endswith(".pt")} == sizes


def test_the_trace_follows_its_format_and_names_its_instrument(pair: Pair) -> None:
    for path in sorted(pair.trace_dir.glob("rank_*.jsonl")):
        raw = [line for line in path.read_bytes().split(b"\n") if line]
        decoded = [json.loads(line) for line in raw]
        assert [fault for record in decoded for fault in check_record(record)] == []
        assert decoded[0]["instrument"] == "hooks"


def test_the_analysis_reads_it(pair: Pair) -> None:
    report = pair.report()
    errors = [problem.message for problem in report.problems if problem.severity == "error"]
    assert errors == []
    assert report.facts.layout == ("TP1 PP2 DP1" if pair.client == "pipeline" else "TP1 PP1 DP2")
    start = report.starts[0]
    assert start.wall is not None and start.finished_ranks == RANKS
    assert {"imports", "rendezvous", "engine_init", "first_step"} - {"imports"} <= {p.name for p in start.phases}
    assert len([save for save in report.saves if save.outcome == "ok"]) == CLIENTS[pair.client][1]
    checkpoints = pair.directory / "traced" / "checkpoints"
    for place in report.storage:  # the Trainer gives DeepSpeed a directory for each checkpoint
        assert place.directory in {str(checkpoints), *map(str, checkpoints.iterdir())}
        assert (place.mount, place.ranks) == (str(mount_of(checkpoints)), RANKS)
    assert [place.use for place in report.storage] == ["save", "load"]
    assert report.model is not None and re.fullmatch(r"[1-9][\d.]* [kM]?\w* ?parameters", report.model), report.model
    # With ZeRO-3 and its defaults, DeepSpeed writes all of the checkpoint twice.
    assert [one.rule for one in report.findings if one.rule == "file_written_twice"] == ["file_written_twice"] * (
        pair.client == "trainer3"
    )
    steps = {r["step"] for r in records(pair.trace_dir) if r["type"] == "iteration"}
    assert steps == ({1, 2, 3} if pair.client.startswith("trainer") else {1, 2})


def test_a_hook_that_raises_switches_itself_off_and_says_so_once(clients: Zygote, tmp_path: Path) -> None:
    """The job goes on as if it was not traced. The other hooks record on: a slow metadata server is seen as such."""
    planted = {"BREAK_A_HOOK": "1", "SLOW_DIRECTORIES": "0.2"}
    traced = run_client(clients, "ordinary", tmp_path / "traced", tmp_path / "trace", **planted)
    plain = run_client(clients, "ordinary", tmp_path / "plain", None)
    assert traced.ok and losses(traced) == losses(plain)
    assert files(tmp_path / "traced") == files(tmp_path / "plain")
    for rank in range(RANKS):
        said = re.findall(r"^the hook around (\S+) is switched off.*planted$", traced.log(rank), re.MULTILINE)
        assert said == ["torch.serialization.save", "torch.serialization.load"]  # two hooks, each once
    trace = records(tmp_path / "trace")
    ended = [r for r in trace if r["type"] == "operation_end"]
    assert sorted(r["operation"] for r in ended) == sorted(["load", "load", "save", "startup"] * RANKS)
    made_ns = [r["duration_ns"] for r in trace if r["type"] == "span" and r["phase"] == "make_directory"]
    assert sum(made_ns) >= 2 * 0.2e9  # `checkpoints` and the checkpoint in it


def test_exit_codes_are_the_jobs_own(clients: Zygote, tmp_path: Path) -> None:
    traced = run_client(clients, "ordinary", tmp_path / "traced", tmp_path / "trace", FAIL_AT="1/0")
    assert traced.exit_codes == [7] * RANKS
    assert {r["step"] for r in records(tmp_path / "trace") if r["type"] == "iteration"} == {1}


def test_coordinates_are_those_of_fsdp(clients: Zygote, tmp_path: Path) -> None:
    """On 4 ranks: all of them shard; two replicas of two shards; two shards with TP2; by groups; none shards."""
    words = [str(tmp_path), str(tmp_path / "trace"), str(SCRIPTS / "fsdp_meshes.py")]
    run = clients.run(words, 4, tmp_path / "logs", script=str(SCRIPTS / "hooked.py"))
    assert run.ok and "switched off" not in run.output, run.output[-3000:]
    for rank in range(4):
        lines = (tmp_path / "trace" / f"rank_0000{rank}_cycle_000.jsonl").read_text().splitlines()
        found = [record for record in map(json.loads, lines) if record.get("type") == "coordinates"]
        high, low, none = rank // 2, rank % 2, {"tp": 0, "pp": 0, "dp": 0}
        assert [{name: at for name, at in one.items() if name not in ("type", "layout")} for one in found] == [
            none | {"fsdp": rank},
            none | {"dp": high, "fsdp": low},
            none | {"tp": low, "fsdp": high},
            none | {"dp": high, "fsdp": low},
            none | {"dp": rank},
        ]
        assert all(check_record(one) == [] for one in found)


OWN = [
    "--num-layers", "4", "--hidden-size", "512", "--num-attention-heads", "8", "--seq-length", "256", "--bf16",
    "--micro-batch-size", "2", "--global-batch-size", "4", "--lr", "1e-3", "--save-interval", "2", "--train-iters", "4",
    "--tensor-model-parallel-size", "2", *LLAMA_STYLE, *NO_DROPOUT,
]  # fmt: skip


def test_our_own_trainer_seen_by_hooks_agrees_with_its_own_trace(
    zygote: Zygote, dataset: list[str], tmp_path: Path
) -> None:
    """Of a run and its resumption: saves, loads, iterations, and the time to the first step.

    Both instruments watch the same run. They begin and end at different lines, so that the shorter an operation, the
    more they differ; docs/results/hooks.md shows by how much, all ranks added up. A busy machine may take longer
    between these lines than the operation does, but not in half of those of a launch.
    """
    save, trace_dir = tmp_path / "save", tmp_path / "hooks"
    env = {
        "RESTART_TRACE_HOOKS_SAVES": "megatron.checkpointing.manager:Checkpointer.save",
        "RESTART_TRACE_HOOKS_LOADS": "megatron.checkpointing.manager:Checkpointer.load",
    }
    words = [str(tmp_path), str(trace_dir), str(ROOT / "pretrain_gpt.py"), *dataset, *OWN]
    for more in (["--exit-interval", "2"], ["--load", str(save)]):
        run = zygote.run(
            [*words, "--save", str(save), *more], RANKS, tmp_path / "logs", env=env, script=str(SCRIPTS / "hooked.py")
        )
        assert run.ok, run.output[-3000:]
    own, seen = records(save / "restart_trace"), records(trace_dir)
    place = {(r["rank"], r["tp"], r["pp"], r["dp"]) for r in seen if r["type"] == "operation_end"}
    assert place >= {(0, 0, 0, 0), (1, 1, 0, 0)}
    mine, theirs = lasted_ns(own), lasted_ns(seen)
    assert mine.keys() == {"save", "load", "startup", "iteration"}
    assert {name: len(each) for name, each in theirs.items()} == {name: len(each) for name, each in mine.items()}
    for cycle in range(2):
        seen_ns = lasted_ns(records(trace_dir, cycle))
        for name, own_ns in lasted_ns(records(save / "restart_trace", cycle)).items():
            ratios = [one / other for one, other in zip(seen_ns[name], own_ns, strict=True)]
            assert sum(0.75 < ratio < 1.33 for ratio in ratios) >= len(ratios) / 2, (cycle, name, ratios)
    note_agreement(mine, theirs)


def lasted_ns(trace: list[dict[str, Any]]) -> dict[str, list[int]]:
    """Kind of operation, or "iteration" -> how long each took."""
    found: dict[str, list[int]] = {}
    for r in trace:
        if r["type"] in ("operation_end", "iteration"):
            found.setdefault(r.get("operation", "iteration"), []).append(r["end_ns"] - r["start_ns"])
    return found


def trace_command(directory: Path, *words: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """The command of the guide, in `directory`; `words`: a launcher, beside this interpreter, and its arguments."""
    binaries = Path(sys.executable).parent
    command = [str(binaries / "restart-trace"), "run", "--trace-dir", "trace", "--", str(binaries / words[0])]
    return subprocess.run(
        [*command, *words[1:]],
        env=environment() | settings, cwd=directory, capture_output=True, text=True, timeout=HANGS_S,
    )  # fmt: skip


def environment() -> dict[str, str]:
    """That of a job on this host."""
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return kept | {
        "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "LOCAL_SIZE": str(RANKS),
    }  # fmt: skip


# Launchers besides torchrun, as their documentation has them on one node, with the client that they start.
LAUNCHERS = {
    "accelerate": (
        ["launch", "--use_deepspeed", "--num_processes", str(RANKS), "--num_machines", "1", "--mixed_precision", "bf16",
         "--dynamo_backend", "no", "--main_process_port", "0"],
        ["accelerate_loop.py", "2"],
    ),
    "deepspeed": (
        ["--num_accelerators", str(RANKS), "--no_local_rank", "--master_port", "PORT"],
        ["plain_deepspeed.py", "ordinary", "2"],
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["accelerate", pytest.param("deepspeed", marks=pytest.mark.nightly(minutes=1))])
def test_a_job_under_another_launcher_is_traced(launcher: str, tmp_path: Path) -> None:
    """Its ranks are, and neither the launcher nor the processes between it and them. No import is left out of what
    README.md has traced (test_readme.py).
    """
    options, (script, *arguments) = LAUNCHERS[launcher]
    options = [str(free_port()) if option == "PORT" else option for option in options]
    done = trace_command(tmp_path, launcher, *options, str(SCRIPTS / script), *arguments, **LEAN)
    said = done.stdout + done.stderr
    assert done.returncode == 0 and "switched off" not in said and "restart_trace:" not in said, said[-3000:]
    assert sorted(path.name for path in (tmp_path / "trace").iterdir()) == [
        "cycle_000.json", *(f"rank_{rank:05d}_cycle_000.jsonl" for rank in range(RANKS)),
    ]  # fmt: skip
    report = analyse(load_trace(tmp_path / "trace")).report
    assert [problem.message for problem in report.problems if problem.severity == "error"] == []
    (start,) = report.starts
    assert start.finished_ranks == RANKS and {"imports", "rendezvous", "first_step"} <= {p.name for p in start.phases}
    assert [save.outcome for save in report.saves] == ["ok"]
    assert [load.outcome for load in report.loads if load.tag] == ["ok"]


@pytest.mark.slow
def test_a_job_under_torchrun_is_traced_over_its_restart(tmp_path: Path) -> None:
    """The command of the guide: the first launch fails at step 3, the second goes on from step 2."""
    done = trace_command(
        tmp_path, "torchrun", "--standalone", "--nproc-per-node", str(RANKS), "--max-restarts", "1",
        str(SCRIPTS / "plain_deepspeed.py"), "ordinary", "4",
        FAIL_AT="3/0",
        **LEAN,
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",  # else restarted ranks may find the addresses of dead ones
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    report = analyse(load_trace(tmp_path / "trace")).report
    first, second = report.starts
    assert (first.is_restart, second.is_restart) == (False, True)
    assert (second.resumed_step, second.reached_step, second.lost_steps) == (2, 3, 1)
    assert second.failure is not None and second.failure.fault is None
    moments = [0.0, second.failure.stopped_s, second.failure.relaunched_s, second.restart_s]
    assert moments == sorted(moments, key=lambda moment: moment or 0.0) and None not in moments
    assert [phase.name for phase in second.phases][:3] == ["process_start", "imports", "rendezvous"]
