"""Trainings that save to and load from an S3 server: killed at any instant, resumed bit for bit."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.checkpointing.store.manifest import Manifest
from megatron.fileio.objects.s3 import Bucket
from megatron.parallel.topology import Layout
from tests.dist.harness import Starvation, Zygote, kill_all, losses, records, wait_for
from tests.dist.tiny_runs import DROPOUT, MODEL, SINGLE, TRAINING, Launcher
from tests.object_storage import BUCKET, FaultProxy, Request, Server, Session, environment_of, listings, serving
from tools.restart_drill.storage_proxy import BUCKET_REGION

TWO = Layout(tp=1, pp=1, dp=2)
FLAGS = [*MODEL, *TRAINING, *DROPOUT, "--verify-restored-state"]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as started:
        yield started


@pytest.fixture
def launcher(zygote: Zygote, dataset: list[str], tmp_path: Path) -> Launcher:
    return Launcher(zygote, dataset, tmp_path)


def saving(uri: str, trace: Path, *more: str) -> list[str]:
    return ["--save", uri, "--load", uri, "--save-interval", "2", "--restart-trace-dir", str(trace), *more]


def manifests(server: Server, prefix: str) -> list[str]:
    with environment_of(server.environment()):
        return sorted(info.key for info in Bucket(BUCKET).list(prefix) if info.key.endswith("manifest.json"))


@pytest.mark.parametrize("job", ["torch", "lazy", "lazy --checkpoint-compression zstd"])
def test_killed_and_resumed_with_the_same_losses(launcher: Launcher, server: Server, job: str) -> None:
    engine, *more = job.split()
    trace, prefix, env = launcher.directory / "trace", f"runs/{'_'.join([engine, *more])}/", server.environment()
    uri, node = f"s3://{BUCKET}/{prefix}", launcher.directory / "node"
    flags = [*FLAGS, "--train-iters", "5000", "--checkpoint-engine", engine]
    stored = [*flags, *saving(uri, trace), "--storage-cache", node, *more]

    def kill_after_two_commits(pids: list[int]) -> None:
        wait_for(lambda: len(manifests(server, prefix)) >= 2, "the second commit")
        kill_all(pids)

    killed = launcher.run(TWO, *stored, env=env, during=kill_after_two_commits)
    assert killed.exit_codes == [-9, -9], killed.output[-3000:]
    newest = max(int(match[1]) for key in manifests(server, prefix) if (match := re.search(r"global_step(\d+)/", key)))
    until = ["--exit-interval", str(newest + 3)]
    resumed = launcher.train(TWO, *stored, *until, env=env)
    assert f"resumed from iteration {newest} of {uri.rstrip('/')}" in resumed.output
    reference = launcher.directory / "reference"
    launcher.train(TWO, *flags, *until, "--restart-trace-dir", reference)
    for rank in range(TWO.world_size):
        expected = {step: loss for step, loss in losses(reference, 0, rank).items() if step > newest}
        assert losses(trace, 1, rank) == expected
    if engine == "lazy":  # onto another layout, which takes the files of both ranks
        of_one = [*flags, "--save", uri, "--load", uri, "--save-interval", "2", "--restart-trace", "off"]
        alone = launcher.train(SINGLE, *of_one, "--exit-interval", str(newest + 4), "--storage-cache", node, env=env)
        assert f"resumed from iteration {newest + 3} of" in alone.output
    assert not list(node.iterdir())
    check_trace(trace, engine)
    for secret in ("AKIATESTTESTTEST", "a-secret-that-must-not-be-told"):
        assert secret not in killed.output + resumed.output
        assert not any(secret in path.read_text() for path in trace.glob("*.jsonl"))


def test_a_job_that_begins_from_a_directory_goes_on_from_its_bucket(launcher: Launcher, server: Server) -> None:
    """The command is repeated: --load, --finetune and the prefetch of files describe its first start."""
    pretrained, uri = launcher.directory / "pretrained", f"s3://{BUCKET}/runs/tuned"
    run = [*FLAGS, "--train-iters", "4", "--restart-trace", "off", "--save-interval", "1"]
    launcher.train(SINGLE, *run, "--save", pretrained, "--exit-interval", "3")
    command = [*run, "--save", uri, "--load", pretrained, "--finetune", "--prefetch-on-start"]
    first = launcher.train(SINGLE, *command, "--exit-interval", "2", env=server.environment())
    second = launcher.train(SINGLE, *command, env=server.environment())
    assert "passed over" not in first.output and f"resumed from iteration 2 of {uri}" in second.output
    told = f"from there; --load {pretrained} --finetune: describes the first start and is passed over"
    assert second.output.count(told) == 1
    steps = {int(match[1]) for key in manifests(server, "runs/tuned/") if (match := re.search(r"step(\d+)/", key))}
    assert steps == {1, 2, 3, 4}


def test_what_a_checkpoint_lacks_is_told_by_its_uri(launcher: Launcher, server: Server) -> None:
    """And not by the directory on the node to which its files are fetched. Its manifest does not tell what it lacks."""
    uri, key = f"s3://{BUCKET}/runs/lacking", "runs/lacking/global_step1/g1_1/manifest.json"
    run = [*FLAGS, "--train-iters", "4", "--restart-trace", "off", "--save-interval", "1", "--save", uri]
    env = server.environment()
    launcher.train(SINGLE, *run, "--no-save-optim", "--exit-interval", "1", env=env)
    with environment_of(env):
        manifest = Manifest.from_json(Bucket(BUCKET).get(key, 1 << 20)[0].decode())
        silent = dataclasses.replace(manifest, training=manifest.training | {"no_save_optim": False})
        Bucket(BUCKET).put(key, silent.to_json().encode())
    refused = launcher.run(SINGLE, *run, "--load", uri, env=env)
    assert refused.exit_codes == [2] and refused.output.count(f"{uri}/global_step1/g1_1: was saved without ") == 1
    assert "restart_storage_" not in refused.output


def check_trace(trace: Path, engine: str) -> None:
    """Uploads and downloads are told with what they moved, and nothing of an operation is unaccounted for."""
    found = records(trace, 1)
    uploads = [r for r in found if r["type"] == "span" and r.get("detail") == "upload"]
    assert uploads and all(r["bytes"] > 0 and r["file"] for r in uploads)
    assert all(r.get("blocking", True) is (engine == "torch") for r in uploads)
    assert any(r["type"] == "span" and r.get("detail") == "download" and r.get("bytes", 0) > 0 for r in found)
    ends = [r for r in found if r["type"] == "probe" and "store_requests" in r["values"]]
    assert ends and all(r["values"]["store_requests"] >= 1 for r in ends)


# Engine torch uploads as lazy does, while training waits.
@pytest.mark.parametrize("engine", [pytest.param("torch", marks=pytest.mark.nightly(minutes=1)), "lazy"])
def test_peers_learn_of_a_stalled_upload_soon_after_its_deadline(
    launcher: Launcher, server: Server, engine: str
) -> None:
    """Rank 1's uploads of the first save hang for ever; what a busy machine adds is taken off. Training goes on."""
    trace, deadline_s = launcher.directory / "trace", 4
    file = "zero_pp_rank_1" if engine == "torch" else "rank_00001"

    def fault(request: Request) -> str | None:
        of_rank_1 = "global_step2/" in request.path and file in request.path
        return "delay" if of_rank_1 and request.method in ("PUT", "POST") else None

    prefix = f"runs/stalled_{engine}/"
    flags = [*FLAGS, "--train-iters", "4", "--checkpoint-engine", engine]
    where = saving(f"s3://{BUCKET}/{prefix}", trace, "--storage-deadline", str(deadline_s))
    with Starvation.noted() as busy, FaultProxy(server, fault).running() as proxy:
        run = launcher.train(TWO, *flags, *where, env=proxy.environment())
    assert any(fault(request) for request in proxy.seen)
    stalled = next(
        r for r in records(trace, 0, 1) if r["type"] == "span" and r.get("detail") == "upload" and r.get("error")
    )
    for rank in range(TWO.world_size):
        end = next(r for r in records(trace, 0, rank) if r["type"] == "operation_end" and r.get("error"))
        begun, told = stalled["start_ns"] / 1e9, end["end_ns"] / 1e9
        assert told - begun - busy(begun, told) < deadline_s + 5, (rank, told - begun)
    assert file in run.output and f"within {deadline_s} s" in run.output, run.output[-3000:]
    (committed,) = manifests(server, prefix)
    assert "global_step4/" in committed


def test_credentials_that_expire_in_the_middle_of_a_save_fail_it_alone(launcher: Launcher, server: Server) -> None:
    """One of two ranks has uploaded when they do; new ones are there for the next save, and nothing was lost."""
    trace, prefix = launcher.directory / "trace", "runs/session"
    session, told = Session(launcher.directory / "credentials"), []
    session.renew()

    def fault(request: Request) -> str | None:
        if len(told) == 2:
            return "expired" if session.is_expired(request, 2) else None
        if request.method != "PUT" or not re.search("global_step4/.*rank_00001.safetensors", request.path):
            return None
        told.append(request)
        if len(told) == 2:  # the rank has looked for new ones, too
            session.renew()
        return "expired"

    flags = [*FLAGS, "--train-iters", "6", "--checkpoint-engine", "lazy"]
    with FaultProxy(server, fault).running() as proxy:
        run = launcher.train(TWO, *flags, *saving(f"s3://{BUCKET}/{prefix}", trace), env=session.environment(proxy))
    failed = [line for line in run.output.splitlines() if "checkpoint global_step4 was not saved: rank 1: " in line]
    assert (
        len(told) == 2 and len(failed) == 1 and "the credentials have expired or are no more valid; renew" in failed[0]
    )
    kept = [re.search(r"global_step(\d+)/", key) for key in manifests(server, prefix)]
    assert [match[1] for match in kept if match] == ["2", "6"]
    with environment_of(server.environment()):
        assert not list(Bucket(BUCKET).list(f"{prefix}/global_step4/"))


@pytest.mark.parametrize(
    ("uri", "environment", "answered", "told"),
    [
        ("s3://no-such-bucket/run", {}, None, "/: there is no bucket no-such-bucket at this endpoint"),
        (
            f"s3://{BUCKET}/run",
            {"AWS_ACCESS_KEY_ID": ""},
            None,
            "/: there are no usable credentials (NoCredentialsError)",
        ),
        (f"s3://{BUCKET}/run", {}, "403", "/: permission denied; the credentials need s3:GetObject"),
        (f"s3://{BUCKET}/run", {}, "expired", "/: the credentials have expired or are no more valid; renew them"),
        (f"s3://{BUCKET}/run", {}, "region", f"/: the bucket is in region {BUCKET_REGION}; set AWS_REGION to it"),
    ],
    ids=["no bucket", "no credentials", "no permission", "expired", "region"],
)
def test_what_is_wrong_is_told_once_before_anything_heavy(
    launcher: Launcher, server: Server, uri: str, environment: dict[str, str], answered: str | None, told: str
) -> None:
    flags = [*FLAGS, "--train-iters", "5", *saving(uri, launcher.directory / "trace")]
    with FaultProxy(server, lambda request: answered).running() as proxy:
        refused = launcher.run(SINGLE, *flags, env=proxy.environment() | environment)
    assert refused.exit_codes == [2] and refused.output.count(uri + told) == 1, refused.output
    assert "Traceback" not in refused.output and not (launcher.directory / "trace").exists()


def test_that_nothing_may_be_written_is_told_once_before_training(launcher: Launcher, server: Server) -> None:
    flags = [*FLAGS, "--train-iters", "5", *saving(f"s3://{BUCKET}/read-only", launcher.directory / "trace")]
    with server.allowing(["s3:ListBucket", "s3:GetObject", "s3:ListBucketMultipartUploads"]) as environment:
        refused = launcher.run(SINGLE, *flags, env=environment)
    told = f"s3://{BUCKET}/read-only/.generations/00000001: permission denied; the credentials need s3:GetObject"
    assert refused.exit_codes == [2] and refused.output.count(told) == 1, refused.output
    assert "Traceback" not in refused.output and environment["AWS_SECRET_ACCESS_KEY"] not in refused.output
    assert not list((launcher.directory / "trace").iterdir())


def test_a_start_lists_its_prefix_once_however_many_hosts_it_has(launcher: Launcher, server: Server) -> None:
    """Each rank is a host of its own: rank 0 lists, and tells the others from what to go on.

    The last two starts begin from another prefix, and go on from what they have saved.
    """
    alone = {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    flags = [*FLAGS, "--train-iters", "8", "--checkpoint-engine", "lazy", "--save-interval", "2"]
    flags += ["--restart-trace", "off"]
    asked: dict[int, list[Counter[str]]] = {1: [], 2: []}
    for hosts, counts in asked.items():
        prefix = f"runs/listed_{hosts}"
        own = [f"{prefix}/"]
        for places, until in ((own, 2), (own, 4), ([f"{prefix}_tuned/", *own], 2), ([f"{prefix}_tuned/"], 4)):
            save = ["--save", f"s3://{BUCKET}/{places[0]}", "--load", f"s3://{BUCKET}/{prefix}"]
            save += ["--finetune"] if places != own else []
            with FaultProxy(server).running() as proxy:
                layout, stop = Layout(tp=1, pp=1, dp=hosts), ["--exit-interval", str(until)]
                run = launcher.train(layout, *flags, *save, *stop, env=proxy.environment() | alone)
            assert ("resumed from iteration 2" in run.output) == (until == 4)
            first = next(i for i, each in enumerate(proxy.seen) if each.method == "PUT" and "/global_step" in each.path)
            found = Counter(listings(proxy.seen[:first]))
            assert {where for where in found if not where.endswith("/.generations/")} == set(places)
            assert all(found[where] == 1 for where in places), found
            counts.append(Counter(where.replace(prefix, "") for where in found.elements()))
    assert asked[1] == asked[2]
