"""All rules with their thresholds. docs/findings.md says why each threshold is what it is."""

from __future__ import annotations

from .comparisons import HOST_LIMITS, RANK_LIMITS
from .costs import (
    cold_imports,
    fsync_dominates,
    serialization_bound,
    small_files,
    wait_previous,
)
from .page_cache import page_cache_reads
from .rule import Rule
from .stragglers import barrier_skew, straggling_hosts, straggling_ranks

RULES: tuple[Rule, ...] = (
    Rule(
        "straggling_rank",
        RANK_LIMITS,
        "Look at that rank's device, its NUMA placement and the storage of its files; `ckpt-analysis "
        "timeline --ranks R` shows what it did. If it moves with the host, take the host out of the job.",
        straggling_ranks,
    ),
    Rule(
        "straggling_host",
        HOST_LIMITS,
        "Compare the host's storage client, network link, clock frequency and other load with its "
        "neighbours', or take it out of the job (HOSTFILE).",
        straggling_hosts,
    ),
    Rule(
        "barrier_skew",
        {"share": 0.5, "least_s": 0.1},
        "Speed up the rank that is waited for (see Barriers); an asynchronous engine (--checkpoint-engine "
        "lazy) moves the wait behind training.",
        barrier_skew,
    ),
    Rule(
        "fsync_dominates",
        {"share": 0.5, "least_s": 0.1},
        "Write around the page cache and in the background: --checkpoint-engine lazy with --direct-io auto. "
        "(--checkpoint-durability none only hides it: a power cut then takes the checkpoint back.)",
        fsync_dominates,
    ),
    Rule(
        "serialization_bound",
        {"share": 0.5, "least_s": 0.1},
        "Use an engine that does not pickle: --checkpoint-engine lazy writes and reads tensors as they are, "
        "on several threads (--io-threads).",
        serialization_bound,
    ),
    Rule(
        "small_files",
        {"least_files": 100, "share": 0.5, "small_bytes": 1e6},
        "Use an engine with one file per rank: --checkpoint-engine lazy. `python -m tools.ckpt_plan` lists "
        "the files of a layout before there is one.",
        small_files,
    ),
    Rule(
        "cold_imports",
        {"share": 0.4, "least_s": 1.0},
        "Launch with `python -m megatron.launch` in torchrun's place: it imports once for all ranks of a node, and "
        "not again when it restarts them. Keep the Python environment on node-local storage or in the container "
        "image, and leave MEGATRON_FULL_IMPORTS unset.",
        cold_imports,
    ),
    Rule(
        "wait_previous",
        {"share": 0.1, "least_s": 0.1},
        "Storage cannot take a checkpoint within --save-interval: save less often, raise --host-cache-size "
        "and --io-threads, or use faster storage.",
        wait_previous,
    ),
    Rule(
        "page_cache_reads",
        {"share": 0.5, "least_bytes": 1e7},
        "Read cold before you compare storage: drop the page cache or load on other hosts than those that "
        "saved; engine lazy with --direct-io on goes around it. As a restart time it stands: restarts on "
        "the same hosts are warm.",
        page_cache_reads,
    ),
)
