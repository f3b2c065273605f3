"""Fixtures: a cluster for the tests of a module, and the tiny preset's data where all of its nodes see them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.cluster import Cluster, ClusterError
from tests.cluster.jobs import Preset
from tests.cluster.probe import why_no_cluster, why_no_slurm
from tests.cluster.slurm import Slurm
from tests.dist.harness import ROOT

NODES = 4


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Four nodes and a login node; a test that loses one adds another."""
    reason = why_no_cluster()
    if reason is not None:
        pytest.skip(reason)
    with Cluster(tmp_path_factory.mktemp("cluster"), NODES) as started:
        yield started


@pytest.fixture(scope="module")
def preset(cluster: Cluster) -> Preset:
    golden = ROOT / "tests" / "golden" / "upstream_run" / "data"
    data = cluster.directory / "data"
    data.mkdir()
    for name in ("corpus_text_document.bin", "corpus_text_document.idx", "tokenizer.model"):
        (data / name).write_bytes((golden / name).read_bytes())
    return Preset(cluster, data)


@pytest.fixture(scope="module")
def slurm(cluster: Cluster) -> Slurm:
    reason = why_no_slurm()
    if reason is not None:
        pytest.skip(reason)
    try:
        return Slurm(cluster)
    except ClusterError as error:
        pytest.skip(f"no cluster here: Slurm does not run on this machine: {error}")
