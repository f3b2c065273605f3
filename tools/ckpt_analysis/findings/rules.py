"""All rules with their thresholds, and the reasons for those that need one. docs/findings.md says when each is met."""

from __future__ import annotations

from .comparisons import HOST_LIMITS, RANK_LIMITS
from .copies import late_copies, missing_copies, read_from_storage, rejected_copies
from .costs import (
    cold_imports,
    compiled_again,
    files_written_twice,
    fsync_dominates,
    serialization_bound,
    slow_name_lookup,
    slow_return,
    small_files,
    wait_previous,
)
from .errors import repeated_errors
from .object_storage import store_one_connection, store_small_objects, store_throttled
from .oversubscription import more_ranks_than_cores
from .page_cache import page_cache_reads
from .rule import Advice, Rule
from .stragglers import barrier_skew, straggling_hosts, straggling_ranks

RULES: tuple[Rule, ...] = (
    Rule(
        "straggling_rank",
        "ranks",
        RANK_LIMITS,
        Advice(
            "Look at that rank's device, its NUMA placement and the storage of its files",
            "Look at that rank's device, its NUMA placement and the storage of its files; `ckpt-analysis "
            "timeline --ranks R` shows what it did. If it moves with the host, take the host out of the job.",
        ),
        None,
        straggling_ranks,
    ),
    Rule(
        "straggling_host",
        "ranks",
        HOST_LIMITS,
        Advice(
            "Compare the host's storage, network and load with its neighbours', or do without it",
            "Compare the host's storage client, network link, clock frequency and other load with its "
            "neighbours', or take it out of the job (HOSTFILE).",
        ),
        Advice(
            "Compare the host's storage, network and load with its neighbours', or do without it",
            "Compare the host's storage client, network link, clock frequency and other load with its "
            "neighbours', or take it out of the job.",
        ),
        straggling_hosts,
    ),
    Rule(
        "barrier_skew",
        "barriers",
        {"share": 0.5, "least_s": 0.1},
        Advice(
            "Speed up the rank that is waited for, or save with --checkpoint-engine lazy",
            "Speed up the rank that is waited for (see Barriers); an asynchronous engine (--checkpoint-engine "
            "lazy) moves the wait behind training.",
        ),
        None,
        barrier_skew,
    ),
    Rule(
        "fsync_dominates",
        "breakdown",
        {"share": 0.5, "least_s": 0.1},
        Advice(
            "Write in the background: --checkpoint-engine lazy with --direct-io auto",
            "Write around the page cache and in the background: --checkpoint-engine lazy with --direct-io auto. "
            "(--checkpoint-durability none only hides it: a power cut then takes the checkpoint back.)",
        ),
        Advice(
            "Have a thread of its own synchronise the files while training goes on",
            "Have a thread of its own synchronise the files while training goes on, and publish the checkpoint "
            "after that; or save less often. (Without fsync a power cut takes the checkpoint back.)",
        ),
        fsync_dominates,
    ),
    Rule(
        "serialization_bound",
        "breakdown",
        {"share": 0.5, "least_s": 0.1},
        Advice(
            "Use an engine that does not pickle: --checkpoint-engine lazy",
            "Use an engine that does not pickle: --checkpoint-engine lazy writes and reads tensors as they are, "
            "on several threads (--io-threads).",
        ),
        Advice(
            "Save fewer and larger tensors",
            "Save fewer and larger tensors. Copies off the device count here, too: "
            "`torch.utils.serialization.config.save.use_pinned_memory_for_d2h = True` speeds them up.",
        ),
        serialization_bound,
    ),
    Rule(
        "small_files",
        "files",
        # A parallel file system needs a few milliseconds to create, fsync and close a file, in which it writes 1 MB at
        # 0.3 to 1 GB/s.
        {"least_files": 100, "share": 0.5, "small_bytes": 1e6},
        Advice(
            "Use an engine with one file per rank: --checkpoint-engine lazy",
            "Use an engine with one file per rank: --checkpoint-engine lazy. `python -m tools.ckpt_plan` lists "
            "the files of a layout before there is one.",
        ),
        Advice(
            "Save fewer and larger files, or to a file system with fast metadata",
            "Save to a file system with fast metadata, or fewer and larger files.",
        ),
        small_files,
    ),
    Rule(
        "file_written_twice",
        "files",
        {"least_bytes": 1e6},
        Advice(
            "Write each file once; with Hugging Face's Trainer and ZeRO-3 gather the weights on saving",
            'Write each file once. With ZeRO-3 and "stage3_gather_16bit_weights_on_model_save": false, Hugging Face\'s '
            "Trainer has DeepSpeed write its whole checkpoint twice; with true it writes that once, and the gathered "
            "weights.",
        ),
        None,
        files_written_twice,
    ),
    Rule(
        "cold_imports",
        "waterfall",
        {"share": 0.4, "least_s": 1.0},
        Advice(
            "Launch with `python -m megatron.launch` in torchrun's place",
            "Launch with `python -m megatron.launch` in torchrun's place: it imports once for all ranks of a node, and "
            "not again when it restarts them. Keep the Python environment on node-local storage or in the container "
            "image, and leave MEGATRON_FULL_IMPORTS unset.",
        ),
        Advice(
            "Keep the Python environment on node-local storage or in the container image",
            "Keep the Python environment, its .pyc files included, on node-local storage or in the container "
            "image, and import what a start does not need where it is needed: `python -X importtime train.py` "
            "shows what costs time.",
        ),
        cold_imports,
    ),
    Rule(
        "slow_name_lookup",
        "waterfall",
        # An answer takes milliseconds; without one each rank waits 5 s or more, the resolver's default.
        {"least_s": 0.5},
        Advice(
            "Set MASTER_ADDR to an address, or enter its name in /etc/hosts of every host",
            "No name server answers for MASTER_ADDR in good time: give its address instead of its name, or enter it in "
            "/etc/hosts of every host.",
        ),
        Advice(
            "Enter the addresses of all hosts in /etc/hosts, or have the resolver give up soon",
            "torch's store asks for the name of every rank's address, one after the other: enter the addresses of"
            " all hosts in /etc/hosts of rank 0's host and that of MASTER_ADDR in all others, as ::ffff:10.0.0.1,"
            ' too, which is what torch asks for; or let /etc/resolv.conf give up soon ("options timeout:1 '
            'attempts:1").',
        ),
        slow_name_lookup,
    ),
    Rule(
        "slow_return",
        "waterfall",
        # A rank that is killed is forked anew in less.
        {"share": 0.3, "least_s": 1.0},
        Advice(
            "Lower --return-timeout, so that such a rank is killed and forked anew",
            "Lower --return-timeout, so that such a rank is killed and forked anew, or restart without "
            "--in-process-restart. A rank leaves when its computation or its call of the file system ends.",
        ),
        None,
        slow_return,
    ),
    Rule(
        "compiled_again",
        "waterfall",
        # To load what an earlier start built takes less; a build takes seconds to minutes.
        {"least_s": 1.0},
        Advice(
            "Keep what was compiled in directories that outlive the job, or build it into the image",
            "Keep what was compiled for the next start: set TORCH_EXTENSIONS_DIR (DeepSpeed's operators and other "
            "extensions), TORCHINDUCTOR_CACHE_DIR (torch.compile) and TRITON_CACHE_DIR (its kernels) to directories on "
            "each host that outlive the job and its container, or build them into the image.",
        ),
        None,
        compiled_again,
    ),
    Rule(
        "wait_previous",
        "throughput",
        # From a tenth on, storage is too slow for the interval, or the cache is too small.
        {"share": 0.1, "least_s": 0.1},
        Advice(
            "Save less often, raise --host-cache-size and --io-threads, or use faster storage",
            "Storage cannot take a checkpoint within --save-interval: save less often, raise --host-cache-size "
            "and --io-threads, or use faster storage.",
        ),
        Advice(
            "Save less often, or use faster storage",
            "Storage cannot take a checkpoint in the time between two saves: save less often, or use faster storage.",
        ),
        wait_previous,
    ),
    Rule(
        "page_cache_reads",
        "probes",
        # By the kernel's count of bytes that it fetched for the process. It includes other reads, so the rule may miss
        # a case.
        {"share": 0.5, "least_bytes": 1e7},
        Advice(
            "Drop the page cache, or load on other hosts, before you compare storage",
            "Read cold before you compare storage: drop the page cache or load on other hosts than those that "
            "saved; engine lazy with --direct-io on goes around it. As a restart time it stands: restarts on "
            "the same hosts are warm.",
        ),
        Advice(
            "Drop the page cache, or load on other hosts, before you compare storage",
            "Read cold before you compare storage: drop the page cache or load on other hosts than those that "
            "saved. As a restart time it stands: restarts on the same hosts are warm.",
        ),
        page_cache_reads,
    ),
    Rule(
        "more_ranks_than_cores",
        "ranks",
        {"ranks_per_core": 1.0},
        Advice(
            "Give every rank a core",
            "Give every rank a core, or compare this run only with others of as many ranks on as many cores.",
        ),
        None,
        more_ranks_than_cores,
    ),
    Rule(
        "copies_missing",
        "throughput",
        {},
        Advice(
            "Look at the host that took no copy and the network to it",
            "Look at the host that the evidence names and the network to it; a longer --peer-timeout helps where "
            "it is only slow. Until there are copies again, a lost host sends all ranks back to an older save, or"
            " to storage.",
        ),
        None,
        missing_copies,
    ),
    Rule(
        "copies_late",
        "throughput",
        # Not in one save: the first of a start has no profile, so all of it may be sent at once.
        {"share": 0.1, "least_saves": 2},
        Advice(
            "Save less often (--save-interval), or give copies a network of their own",
            "Save less often (--save-interval), so that copies have more steps to go in, or give copies a network"
            " of their own; --replication-traffic naive sends them as soon as a save is there.",
        ),
        None,
        late_copies,
    ),
    Rule(
        "read_from_storage",
        "throughput",
        {},
        Advice(
            "Keep more copies (--replicas), or write to storage more often (--persist-interval)",
            "Keep more copies (--replicas), apart from each other (--failure-domain), or write to storage more often "
            "(--persist-interval), so that less is lost. A launch that was started anew has no save in memory.",
        ),
        None,
        read_from_storage,
    ),
    Rule(
        "copies_rejected",
        "throughput",
        {},
        Advice(
            "Test the memory of the host that held the copy, and the network to it",
            "A copy that was altered in memory: test the memory of the host that the evidence names, and take it "
            "out of the job if it happens again. One that did not answer: look at that host and the network to "
            "it.",
        ),
        None,
        rejected_copies,
    ),
    Rule(
        "repeated_error",
        "budget",
        {"cycles": 2},
        Advice(
            "Look at the data of that iteration, or go back further: --on-repeated-error back",
            "A restart does not help: look at the data of that iteration, and at the checkpoint that it was "
            "reached from. --on-repeated-error back goes on from the one before.",
        ),
        Advice(
            "Look at the data of that iteration, and at the checkpoint before it",
            "A restart does not help: look at the data of that iteration, and at the checkpoint that it was "
            "reached from.",
        ),
        repeated_errors,
    ),
    Rule(
        "store_throttled",
        "throughput",
        # A steady 1 % shows that the store's limit is reached. No cost is stated, as pauses before retries are not
        # measured.
        {"share": 0.01},
        Advice(
            "Make fewer requests (--checkpoint-engine lazy), or ask the provider for a higher rate",
            "Ask the provider for a higher request rate, spread runs over buckets or prefixes, or make fewer requests: "
            "fewer and larger objects (--checkpoint-engine lazy has one for each rank), a longer --save-interval. "
            "--storage-deadline says how long a request is repeated.",
        ),
        Advice(
            "Make fewer requests, or ask the provider for a higher rate",
            "Ask the provider for a higher request rate, spread runs over buckets or prefixes, or make fewer requests: "
            "fewer and larger objects, fewer saves.",
        ),
        store_throttled,
    ),
    Rule(
        "store_small_objects",
        "throughput",
        # A request takes 10 to 100 ms, whatever its size.
        {"least_objects": 4, "share": 0.5, "least_s": 0.1},
        Advice(
            "Use an engine with one file per rank: --checkpoint-engine lazy",
            "Use an engine with one file per rank: --checkpoint-engine lazy. Objects over 8 MiB go in parts, several "
            "at once.",
        ),
        Advice(
            "Save fewer and larger files",
            "Save fewer and larger files: an object of one request takes the store's response time, whatever its size.",
        ),
        store_small_objects,
    ),
    Rule(
        "store_one_connection",
        "throughput",
        # Eight parts are sent concurrently, so an average below 1.5 means that hardly any overlapped.
        {"connections": 1.5, "least_s": 0.1},
        Advice(
            "Use --checkpoint-engine lazy, whose large objects go in parts, or give the rank a core",
            "If objects take one request each, use --checkpoint-engine lazy, with one object for each rank that "
            "goes in parts. If they are large, the rank itself is the limit: give it a core, and look at the "
            "speed of --storage-cache.",
        ),
        Advice(
            "Send and fetch large objects in parts, several at once",
            "Send and fetch large objects in parts, several at once; if that is done, give each rank a core.",
        ),
        store_one_connection,
    ),
)
