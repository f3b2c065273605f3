"""pretrain(): set-up, restore, the training loop and the end. Records the phases of the start-up."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron.config import Config, ConfigError
from megatron.config.arguments import exit_with, parse_or_exit
from megatron.config.uris import is_uri
from megatron.parallel.topology import Layout
from megatron.processes import in_process_restart
from megatron.processes.parent_process import end_with_launcher
from megatron.processes.standby import LOADS_VARIABLE, is_standby, wait_for_release
from megatron.training.heavy_imports import import_everything
from megatron.training.in_process_restart import keep_engine, kept_engine, prepare_to_return
from megatron.training.standby import LoadsAhead, StandbyRanks, why_not_ahead
from restart_trace.clock import now_ns, process_start_ns
from restart_trace.process import RankIdentity, open_rank_trace, process_fields
from restart_trace.recorder import Recorder, untraced_recorder
from restart_trace.startup import Startup, preload_of
from restart_trace.under_way import RANKS, UnderWay

if TYPE_CHECKING:
    import subprocess

    from megatron.checkpointing.engines.memory.early_copy import EarlyCopy
    from megatron.checkpointing.manager import Checkpointer
    from megatron.checkpointing.preflight.first_start import FirstStart
    from megatron.checkpointing.preflight.prefetch import Prefetch
    from megatron.checkpointing.preflight.repeated_errors import StepErrors
    from megatron.checkpointing.state.collect import Progress
    from megatron.checkpointing.store.bucket.generations import ObjectOwnership
    from megatron.checkpointing.store.ownership import Ownership
    from megatron.parallel.control_plane import ControlPlane
    from megatron.startup.initialize import Runtime
    from megatron.startup.preflight import Vocabulary
    from megatron.startup.watch import Watch
    from megatron.training.checkpoints import CheckpointSaves
    from megatron.training.data import DataIterators
    from megatron.training.exit_conditions import ExitConditions
    from megatron.training.hf_exports import HFExports
    from megatron.training.log import TrainingLog
    from megatron.training.profiling import StepProfiler
    from megatron.training.statistics import TrainingStatistics

logger = logging.getLogger(__name__)


@dataclass
class Trainer:
    """The state of the training loop."""

    config: Config
    engine: Any
    data: DataIterators
    progress: Progress
    recorder: Recorder
    startup: Startup
    saves: CheckpointSaves
    exits: ExitConditions
    log: TrainingLog
    statistics: TrainingStatistics
    profiler: StepProfiler
    errors: StepErrors
    exports: HFExports | None  # with --export-hf-interval, on rank 0
    stopped: bool = False  # by an exit condition, before the end of the run


def pretrain(
    datasets_provider: Callable[..., Any],
    model_provider: Callable[..., Any],
    batch_fn: Callable[..., Any],
    *,
    entered_ns: int,
) -> int:
    """Train as the command line says. Returns the exit code.

    0: trained to the end; 1: the last checkpoint could not be saved, or a rank failed or did not answer; 2: the command
    line, the data or the checkpoint cannot be used, as the message says; 65: the same error has ended the starts before
    (megatron.checkpointing.preflight.repeated_errors). `entered_ns`: when the program's own code began (monotonic, ns).
    """
    config = parse_or_exit()
    rank = config.parallel.rank
    try:
        end_with_launcher(os.environ, config.training.stops_at)
        prepare_to_return(config)
    except ValueError as error:
        exit_with(error, rank, every_rank_sees_it=True)
    if config.training.allow_injected_faults:
        from megatron.startup.injected_faults import allow_injected_faults

        allow_injected_faults()
    from megatron.checkpointing.engines.errors import CheckpointError, EngineUnavailableError
    from megatron.startup.once_per_host import once_per_host
    from megatron.startup.preflight import check_before_imports

    beginning = Start(config, entered_ns)
    try:
        vocabulary, beginning.later_start, beginning.back_to = once_per_host(
            functools.partial(check_before_imports, config),
            os.environ,
            60 * config.parallel.distributed_timeout_minutes,
        )
        if not is_standby():
            beginning.begin()
    except (CheckpointError, ConfigError, OSError, ValueError) as error:
        exit_with(error, rank, every_rank_sees_it=False)
    watch = _import_and_watch(config, beginning.startup)
    from megatron.training.data import DataError

    try:
        trainer = _set_up(config, beginning, vocabulary, _Providers(datasets_provider, model_provider, batch_fn))
        _train_to_the_last_commit(trainer)
        _shut_down(trainer)
        beginning.check_still_owner()
        beginning.recorder.process_ended("a save failed" if trainer.saves.failed else None)
        if trainer.exports is not None:
            _finish_exports(trainer, trainer.exports)
        beginning.recorder.close()
        beginning.end_following()
    except (CheckpointError, ConfigError, DataError, EngineUnavailableError) as error:
        beginning.recorder.close()
        exit_with(error, rank)
    except RuntimeError as error:
        if not _is_lost_rank(error, config, watch, beginning.recorder):
            raise
        return 1
    finally:
        watch.close()
    if beginning.ownership is not None:
        beginning.ownership.release()
    return 1 if trainer.saves.failed else 0


class Start:
    """The first part of a start: claims --save, opens the trace and starts the prefetch, in `begin`.

    A standby rank begins when it is released: its work before that is not part of a restart, and is not recorded.
    `later_start`: --save holds checkpoints of this run, so the flags of its first start are passed over. `back_to`: the
    older one of them that --on-repeated-error goes back to.
    """

    def __init__(self, config: Config, entered_ns: int) -> None:
        self._config = config
        self.later_start = False
        self.back_to: str | None = None
        self.begun_ns = in_process_restart.started_ns() or process_start_ns() or entered_ns
        self._entered_ns = entered_ns
        self.recorder: Recorder = untraced_recorder()
        self.startup = Startup(self.recorder, None, config.parallel.rank, 0, entered_ns)
        self.ownership: Ownership | ObjectOwnership | None = None
        self._follower: subprocess.Popen[bytes] | None = None
        self.prefetch: Prefetch | None = None
        self._is_told = False
        self.early_copy: EarlyCopy | None = None

    def begin(self, released_ns: int | None = None) -> None:
        """`released_ns`: when a standby rank was released.

        Raises CheckpointError, ConfigError, OSError or ValueError.
        """
        from megatron.checkpointing.preflight.prefetch import start_prefetch
        from megatron.startup.preflight import goes_back_to, is_later_start, is_told, list_save_once, store_refusals

        self._is_told = told = is_told(self._config, self.later_start)
        if released_ns is not None and not told:  # the ranks that this one replaces may have saved since its checks
            with store_refusals(self._config):
                list_save_once(self._config.checkpoint)
        self.ownership = claim_save_directory(self._config)
        in_process_restart.at_return(self._leave)
        begun_ns = released_ns or in_process_restart.started_ns()
        self.recorder, self.startup, cycle = _open_trace(self._config, self._entered_ns, begun_ns)
        self._follower = _start_follower(self._config, cycle)
        self.begun_ns = released_ns or self.begun_ns
        if released_ns is not None and not told:
            self.later_start = is_later_start(self._config)
            self.back_to = goes_back_to(self._config, self.later_start)
        if not told:
            self.prefetch = start_prefetch(self.config, Layout(**self._config.parallel.layout))
        self.early_copy = _start_early_copy(self._config)

    def _leave(self) -> None:
        """The process lives on, and starts again: end what this start has begun. What has ended before ends once."""
        for reader in (self.prefetch, self.early_copy):
            if reader is not None:
                reader.close()
        self.recorder.close()
        if self._follower is not None:
            self._follower.terminate()  # it sends the last spans and ends; the next start has one of its own
        if self.ownership is not None:
            self.ownership.release()

    def end_listing(self) -> None:
        """The state is restored: what was listed for this start may be out of date from here on."""
        if self._config.checkpoint.in_object_storage:
            from megatron.checkpointing.store.bucket.checkpoints import drop_listings

            drop_listings()

    def end_following(self) -> None:
        """After the end of the training: wait until its last spans are sent (--otlp), a few seconds at most.

        After a failure nothing waits, since that would delay the restart: the process ends by itself.
        """
        if self._follower is not None:
            from restart_trace.follower import end_follower

            end_follower(self._follower)

    @property
    def config(self) -> Config:
        """Of this start, as this rank sees --save; `agreed` is that of all ranks."""
        from megatron.startup.preflight import of_this_start

        return of_this_start(self._config, self.later_start, self.back_to)

    def agreed(self, control: ControlPlane) -> tuple[Config, FirstStart]:
        """The configuration of this start and how its run began, as rank 0 decides; collective. Raises ConfigError."""
        from megatron.checkpointing.preflight.first_start import FirstStart, passed_over
        from megatron.checkpointing.preflight.prefetch import start_prefetch
        from megatron.startup.preflight import how_the_run_began

        begins = how_the_run_began(self._config) if control.rank == 0 else FirstStart()
        self.later_start, self.back_to, begins = control.broadcast((self.later_start, self.back_to, begins))
        if self._is_told:
            self.prefetch = start_prefetch(self.config, Layout(**self._config.parallel.layout))
        if self.later_start and control.rank == 0:
            logger.info("%s", passed_over(self._config.checkpoint))
        return self.config, begins

    def check_still_owner(self) -> None:
        """At the end: raises SaveDirectorySupersededError if a later launch has taken --save since the last save.

        That launch goes on from what it found there, perhaps without the last checkpoint of this one.
        """
        from megatron.fileio.objects.errors import ObjectStoreError

        if self.ownership is None:
            return
        try:
            self.ownership.check()
        except (OSError, ObjectStoreError) as error:
            logger.warning("--save: whether another launch has taken it over could not be found out: %s", error)

    def wait_and_begin(self, load_ahead: Callable[[], object] | None) -> None:
        """In a standby rank that is set up: wait for the release, then begin. `load_ahead`: with --standby-load."""
        from megatron.checkpointing.engines.errors import CheckpointError

        process_fields(os.environ)  # fills its caches, so that the first record of the trace takes no time later
        wait_for_release(load_ahead)
        try:
            self.begin(now_ns())
        except (CheckpointError, ConfigError, OSError, ValueError) as error:
            exit_with(error, self._config.parallel.rank, every_rank_sees_it=False)


def _start_early_copy(config: Config) -> EarlyCopy | None:
    """With engine memory, on a host that does not have the save that this rank will load: begin to fetch it."""
    if config.checkpoint.checkpoint_engine != "memory":
        return None
    from megatron.peers.client import MEMBERS_VARIABLE
    from megatron.peers.wire import key_of

    if MEMBERS_VARIABLE not in os.environ:
        return None
    # This imports torch, which the launcher that set MEMBERS_VARIABLE has already imported for its ranks.
    from megatron.checkpointing.engines.memory.early_copy import start_early_copy

    parallel = config.parallel
    layout = Layout(**parallel.layout)
    key = None
    if config.checkpoint.save is not None:
        key = key_of({"layout": layout.as_dict(), "place": layout.coordinates(parallel.rank)._asdict()})
    return start_early_copy(key, parallel.local_rank, config.checkpoint.peer_timeout)


def _import_and_watch(config: Config, startup: Startup) -> Watch:
    """Import everything that training needs, then start to watch the waits of this rank."""
    with startup.phase_around("imports") as imports:
        import_everything(imports)
        if config.training.torch_compile:
            from megatron.startup.compilation import import_compiler

            import_compiler()
        from megatron.startup.logging_setup import set_up_logging
        from megatron.startup.watch import Watch

        set_up_logging(config.training.log_level, config.parallel.rank)
        config.log_notes(logger)
        return Watch(config).start()


def _is_lost_rank(error: RuntimeError, config: Config, watch: Watch, recorder: Recorder) -> bool:
    """Whether `error` comes from another rank or the host; if so, close the trace and print the reason."""
    from megatron.parallel.lost_peers import comes_from_another_rank, has_timed_out
    from megatron.processes.telling import tell
    from megatron.training.lost_ranks import explain

    in_process_restart.note_error()
    explained = explain(error, config, watch)
    if explained is None:
        return False
    recorder.close()
    if comes_from_another_rank(error) and not has_timed_out(error):  # that one has ended, as the launcher sees
        in_process_restart.another_rank_is_lost()
    rank = config.parallel.rank
    logger.debug("rank %d was ended from outside", rank, exc_info=True)
    tell(f"error on rank {rank}, {os.uname().nodename}: {explained}")
    return True


def _train_to_the_last_commit(trainer: Trainer) -> None:
    """Train. No save is pending afterwards, unless a save hangs while an exception ends training."""
    from megatron.parallel.lost_peers import has_timed_out

    try:
        train(trainer)
    except BaseException as error:
        in_process_restart.note_error()
        trainer.errors.close()
        if is_its_own(error):
            step = trainer.progress.iteration + 1
            trainer.recorder.event("failure", "training_error", trainer.errors.note(error, step), step)
        if not has_timed_out(error):  # otherwise a pending save would wait for the same rank
            trainer.saves.drain_after_error()
        raise
    trainer.saves.drain()
    trainer.errors.close(trained=True)


def _finish_exports(trainer: Trainer, exports: HFExports) -> None:
    """On rank 0, when all else is done and the other ranks have ended, or are about to: nothing here fails the run."""
    trainer.exits.catch_all()
    exports.finish(lambda: trainer.stopped or trainer.exits.signalled)
    trainer.saves.prune_alone(trainer.progress.iteration)


def is_its_own(error: BaseException) -> bool:
    """Whether the training itself went wrong: not another rank, the host, --save, or who ends this process."""
    from megatron.checkpointing.engines.errors import CheckpointError
    from megatron.parallel.lost_peers import comes_from_another_rank
    from megatron.startup.injected_faults import InjectedFault
    from megatron.training.lost_ranks import comes_from_host

    of_others = isinstance(error, (CheckpointError, ConfigError, InjectedFault))
    outside = of_others or comes_from_another_rank(error) or comes_from_host(error)
    return isinstance(error, Exception) and not outside


class _Providers(NamedTuple):
    """The functions that pretrain_gpt.py passes to `pretrain`."""

    datasets: Callable[..., Any]
    model: Callable[..., Any]
    batch_fn: Callable[..., Any]


def claim_save_directory(config: Config) -> Ownership | ObjectOwnership | None:
    """Claim --save for this launch. Returns the ownership on rank 0, None on other ranks.

    Raises SaveDirectoryInUseError if another live launch saves there; ConfigError if the directory cannot be claimed.
    """
    from megatron.checkpointing.store.ownership import check_not_in_use, claim
    from restart_trace.cycles import is_restart_in_place, job_key

    if config.checkpoint.save is None:
        return None
    save_dir, key = Path(config.checkpoint.save), job_key(os.environ)
    # A launch that was superseded and is restarted in place must not take the directory back.
    restarted = is_restart_in_place(os.environ)
    take_over = config.checkpoint.take_over and not restarted
    if is_uri(config.checkpoint.save):
        return _claim_prefix(config, config.checkpoint.save, key, take_over, restarted)
    try:
        if config.parallel.rank == 0:
            return claim(save_dir, key, take_over=take_over, restarted=restarted)
        if not take_over:
            check_not_in_use(save_dir, key, first_of_host=config.parallel.local_rank == 0)
    except OSError as error:
        raise ConfigError(
            f"--save {save_dir}: cannot be claimed: {error.filename or save_dir}: {error.strerror}; correct that, or "
            "give another --save"
        ) from error
    return None


def _claim_prefix(config: Config, save: str, key: str, take_over: bool, restarted: bool) -> ObjectOwnership | None:
    """As `claim_save_directory`, for a --save that is a URI."""
    from megatron.checkpointing.store.bucket.checkpoints import open_checkpoints
    from megatron.checkpointing.store.bucket.generations import claim
    from megatron.startup.preflight import store_refusals

    if config.parallel.rank != 0:  # the request of each host would be a listing, or several
        return None
    stored = open_checkpoints("--save", save, config.checkpoint)
    with store_refusals(config):
        ownership = claim(stored.bucket, stored.uri, key, take_over=take_over, restarted=restarted)
        stored.claimed(ownership.generation)
    return ownership


def _open_trace(config: Config, entered_ns: int, released_ns: int | None) -> tuple[Recorder, Startup, int]:
    """(recorder, start-up, cycle). `released_ns`: as of Startup."""
    parallel, parts = config.parallel, config.parallel.ds_sequence_parallel_size
    divided = parallel.moe_expert_parallel_size
    tp, pp, dp = Layout(*parallel.sizes).coordinates(parallel.rank)
    directory = config.trace.restart_trace_dir if config.trace.restart_trace else None
    trace_dir = Path(directory) if directory else None
    identity = RankIdentity(
        rank=parallel.rank,
        world_size=parallel.world_size,
        local_rank=parallel.local_rank,
        coordinates=(tp, pp, dp // parts),
        layout=(*parallel.sizes[:2], parallel.data_parallel_size),
        sequence=(dp % parts, parts),
        experts=(dp % divided, divided),
    )
    try:
        recorder, cycle = open_rank_trace(
            trace_dir,
            identity,
            os.environ,
            engine_asked=config.checkpoint.checkpoint_engine,
            durability=config.checkpoint.checkpoint_durability,
            probes=config.trace.trace_probes,
            returns=in_process_restart.returns(),
        )
    except OSError as error:
        raise ConfigError(
            f"--restart-trace-dir {trace_dir}: cannot be written to: {error.strerror}; give another directory, or "
            "--restart-trace off"
        ) from error
    preload = preload_of(os.environ)
    startup = Startup(
        recorder, trace_dir, parallel.rank, cycle, entered_ns, preload,
        released_ns=released_ns, before=in_process_restart.phases(), contiguous=True,
    )  # fmt: skip
    return recorder, startup, cycle


def _start_follower(config: Config, cycle: int) -> subprocess.Popen[bytes] | None:
    """Start the process that sends the spans of this cycle (--otlp): on rank 0, for the files of all ranks."""
    endpoint, directory = config.trace.otlp, config.trace.restart_trace_dir
    if endpoint is None or directory is None or config.parallel.rank != 0:
        return None
    from restart_trace.follower import start_follower

    try:
        return start_follower(Path(directory), endpoint, str(cycle), os.getpid())
    except OSError as error:
        logger.warning("--otlp %s: %s cannot be started (%s): no spans are sent", endpoint, sys.executable, error)
        return None


def _sample_continuously(config: Config, recorder: Recorder) -> None:
    """Start the samples of --restart-trace-probes-interval; after torch is imported, since they read its counters."""
    interval = config.trace.trace_probes_interval
    if interval is not None and recorder.enabled:
        from restart_trace.probes import make_probe

        recorder.sample_every(interval, make_probe(config.parallel.local_rank, bus=True))


def _layers_to_load(config: Config, runtime: Runtime, model: Any) -> list[str]:
    """Names of the files with the layers that this rank reads in a load, if they are in files of their own."""
    from megatron.checkpointing.state.layer_files import layer_files
    from megatron.checkpointing.state.replicas import layers_read_by
    from megatron.checkpointing.store.naming import RankPlace

    place = RankPlace(runtime.layout, runtime.coordinates, config.model.params_dtype)
    return layers_read_by(layer_files(model, place), place, divided=config.checkpoint.ckpt_fully_parallel_load)


def _set_up(config: Config, beginning: Start, vocabulary: Vocabulary, providers: _Providers) -> Trainer:
    """Set up everything that the first iteration needs; collective."""
    from megatron.checkpointing.preflight.repeated_errors import StepErrors
    from megatron.checkpointing.state.changed_flags import input_contents
    from megatron.checkpointing.state.collect import Progress
    from megatron.fileio.host_memory import available_memory
    from megatron.startup.engine_setup import elements_of
    from megatron.startup.initialize import initialize_megatron
    from megatron.training.checkpoints import CheckpointSaves, build_checkpointer, prepare_memory
    from megatron.training.data import agreed_vocabulary, batch_request, build_data_iterators
    from megatron.training.exit_conditions import ExitConditions
    from megatron.training.free_space import check_free_space
    from megatron.training.log import TrainingLog
    from megatron.training.profiling import StepProfiler
    from megatron.training.slot_memory import reserve_slots
    from megatron.training.standby import opened_once, rehearse
    from megatron.training.statistics import TrainingStatistics

    startup = beginning.startup
    with startup.phase("engine_init"):
        free = available_memory()  # before the rendezvous, so that no rank of this host has allocated any for saves
    runtime = initialize_megatron(config, startup, commits_in_background=_saves_in_background(config, startup))
    control, vocabulary = runtime.control, agreed_vocabulary(config, vocabulary, runtime.control)
    engine, model = _kept_or_new(config, runtime, vocabulary.padded, providers)
    parameters = elements_of(model)
    batch_fn = functools.partial(providers.batch_fn, request=batch_request(config, runtime, vocabulary.eod))
    loads = None
    if is_standby():
        engine = _build_engine(config, runtime, model, batch_fn)
        providers = providers._replace(datasets=opened_once(providers.datasets))
        rehearse(engine, build_data_iterators(providers.datasets, config, runtime, Progress()))
        loads = _begin_after_standby(config, beginning, runtime, vocabulary, engine)
        startup = runtime.communicators.startup = beginning.startup
    config, begins = beginning.agreed(control)
    recorder, prefetch = beginning.recorder, beginning.prefetch
    _sample_continuously(config, recorder)
    if prefetch is not None:
        prefetch.also(_layers_to_load(config, runtime, model))
    with runtime.communicators.apart_from("engine_init"):
        checkpointer = build_checkpointer(
            config, runtime, control, recorder, beginning.ownership, vocabulary[:2], prefetch, beginning.early_copy,
            loads, begins,
        )  # fmt: skip
    assert startup.operation is not None
    prepare_memory(checkpointer, runtime, parameters, free, startup.operation)
    engine = _connected(engine or _build_engine(config, runtime, model, batch_fn), config, runtime, batch_fn)
    with startup.phase("engine_init"):
        runtime_line = _record_runtime(checkpointer, engine, runtime, config, recorder, vocabulary.padded)
        _mark_ranges(recorder, config, runtime.device)
    progress = _restore_or_begin(checkpointer, engine, beginning)
    with startup.phase("engine_init"):
        check_free_space(config, parameters, runtime.coordinates.dp, progress.iteration, control, beginning.ownership)
    with startup.phase("data_build"):
        if config.checkpoint.save is not None and runtime.coordinates.dp == 0:
            input_contents(config.data)  # read here, not within the first save
        data = build_data_iterators(providers.datasets, config, runtime, progress)
    with startup.phase("imports"):
        log = TrainingLog(config, vocabulary.padded)  # imports TensorBoard if a flag asks for it
    reserve_slots(checkpointer, runtime, parameters, engine.basic_optimizer, startup.operation)
    with startup.phase("engine_init"):
        logger.info("%s", runtime_line)
        exports = _begin_exports(checkpointer, progress)
        return Trainer(
            config, engine, data, progress, recorder, startup,
            CheckpointSaves(checkpointer, engine, runtime.device, exports),
            ExitConditions(config, control, beginning.begun_ns),
            log,
            TrainingStatistics(engine, config.training, runtime.layout, runtime.coordinates),
            StepProfiler(config),
            StepErrors(
                config.checkpoint, begins, checkpointer.context.generation, progress.iteration, control.rank,
                run_id=checkpointer.context.run_id, back_to=beginning.back_to,
            ),
            exports,
        )  # fmt: skip


def _begin_exports(checkpointer: Checkpointer, progress: Progress) -> HFExports | None:
    """With --export-hf-interval, on rank 0: the exports of this run, beginning with what it goes on from."""
    from megatron.training.hf_exports import HFExports

    context = checkpointer.context
    if context.control.rank != 0 or context.config.checkpoint.export_hf_interval is None:
        return None
    exports = HFExports(
        context.config.checkpoint, context.run_id, context.generation, checkpointer.writer.in_use, context.recorder
    )
    exports.resumed(progress.iteration)
    return exports


def _begin_after_standby(
    config: Config, beginning: Start, runtime: Runtime, vocabulary: Vocabulary, engine: Any
) -> LoadsAhead | None:
    """Wait as a rank of the next start, with --standby-load loading each checkpoint; returns these loads."""
    loads = None
    if LOADS_VARIABLE in os.environ and why_not_ahead(config.checkpoint) is None:
        loads = LoadsAhead(config, runtime, vocabulary[:2], engine)
    beginning.wait_and_begin(None if loads is None else loads.load)
    return loads


def _kept_or_new(config: Config, runtime: Runtime, padded: int, providers: _Providers) -> tuple[Any, Any]:
    """The engine that this process has kept, None if it has none; the model, which is built then."""
    engine = kept_engine(runtime)
    return engine, _build_model(config, runtime, padded, providers) if engine is None else engine.module


def _build_model(config: Config, runtime: Runtime, padded: int, providers: _Providers) -> Any:
    """The layers of this rank's stage. `padded`: padded vocabulary size."""
    from megatron.startup.logging_setup import printed_as_debug

    with contextlib.ExitStack() as building:
        building.enter_context(runtime.communicators.apart_from("model_build"))
        building.enter_context(printed_as_debug())
        if config.parallel.zero_stage == 3:
            from megatron.startup.zero3_engine import divided_where_built

            building.enter_context(divided_where_built(config))
        return providers.model(config, padded, runtime)


def _build_engine(config: Config, runtime: Runtime, model: Any, batch_fn: Callable[[Any], Any]) -> Any:
    """DeepSpeed's engine, with --warmup-communicators and --warmup-kernels ready for its first step."""
    from megatron.startup.engine_setup import build_engine
    from megatron.startup.kernels import warm_up_kernels, warm_up_optimizer
    from megatron.startup.logging_setup import printed_as_debug

    with runtime.communicators.apart_from("engine_init"), printed_as_debug():
        engine = build_engine(config, model, batch_fn)
    if not in_process_restart.is_possible():
        _warm_up_communicators(config, runtime, model)  # before the collectives of layers in the compilation
    if config.training.torch_compile:
        from megatron.startup.compilation import compile_layers

        with runtime.communicators.startup.phase("compile"), UnderWay(RANKS, "compilation of layers"):
            compile_layers(config, runtime, model)
    if config.parallel.warmup_kernels:
        with runtime.communicators.startup.phase("warmup", "kernels"), UnderWay(RANKS, "warm-up of kernels"):
            warm_up_kernels(config, runtime, model, batch_fn)
            warm_up_optimizer(engine.basic_optimizer, next(model.parameters()).dtype, runtime.device)
    return engine


def _connected(engine: Any, config: Config, runtime: Runtime, batch_fn: Callable[[Any], Any]) -> Any:
    """`engine`; with --in-process-restart its groups are connected only now, and it is kept when this rank returns."""
    if in_process_restart.is_possible():
        engine.set_batch_fn(batch_fn)  # of this run of the script
        keep_engine(engine, config, runtime)
        runtime.communicators.reconnect()
        _warm_up_communicators(config, runtime, engine.module)
    return engine


def _warm_up_communicators(config: Config, runtime: Runtime, model: Any) -> None:
    if config.parallel.warmup_communicators:
        exchanging = (config.parallel.ds_sequence_parallel_size, config.parallel.moe_expert_parallel_size)
        runtime.communicators.connect_all(runtime.rank, runtime.device, next(model.parameters()).dtype, exchanging)


def _record_runtime(
    checkpointer: Checkpointer, engine: Any, runtime: Runtime, config: Config, recorder: Recorder, padded: int
) -> str:
    """Write the trace's `runtime` record. Returns a line for the log. `padded`: padded vocabulary size."""
    from megatron.startup.engine_setup import runtime_facts

    facts, engine_used = runtime_facts(engine, runtime, config), checkpointer.context.engine_class
    engine_asked = config.checkpoint.checkpoint_engine
    recorder.write("runtime", engine_used=engine_used, engine_asked=engine_asked, **facts)
    parts = config.parallel.ds_sequence_parallel_size
    shown = f"{runtime.layout}, {parts} of DP for each sequence," if parts > 1 else str(runtime.layout)
    return (
        f"{shown} on {runtime.device.type}: {facts['parameters']} parameters on this rank, padded vocabulary "
        f"{padded}, optimizer {facts['optimizer']}, checkpoint engine {engine_used}"
    )


def _restore_or_begin(checkpointer: Checkpointer, engine: Any, beginning: Start) -> Progress:
    """Load a checkpoint if --load has one, otherwise initialise the state. Ends the prefetch in either case."""
    from megatron.checkpointing.state.collect import Progress
    from megatron.training.checkpoints import initialize_state, restore

    context, startup = checkpointer.context, beginning.startup
    with startup.phase_beside_operation("engine_init"):
        progress = restore(checkpointer, engine)
        beginning.end_listing()
        if context.prefetch is not None:
            context.prefetch.close()
        if context.early_copy is not None:
            context.early_copy.close()
    if progress is None:
        with startup.phase("model_build"):
            initialize_state(checkpointer, engine)
        progress = Progress()
    return progress


def _mark_ranges(recorder: Recorder, config: Config, device: Any) -> None:
    """Show spans in NVIDIA's profiler, too."""
    if device.type == "cuda" and config.trace.trace_nvtx is not False and recorder.enabled:
        import torch

        recorder.nvtx = torch.cuda.nvtx


def _saves_in_background(config: Config, startup: Startup) -> bool:
    from megatron.checkpointing.engines.registry import engine_class

    if config.checkpoint.save is None:
        return False
    with startup.phase("imports"):
        return engine_class(config.checkpoint.checkpoint_engine).asynchronous


def train(trainer: Trainer) -> None:
    """Train until the end of the run or an exit condition, with evaluations and saves in between and at the end."""
    config, progress = trainer.config, trainer.progress
    training = config.training
    loop_start = now_ns()
    standby = StandbyRanks(config)
    trainer.exits.start()
    if progress.iteration >= training.train_iters:
        logger.info(
            "--train-iters %d: iteration %d is reached, nothing is trained", training.train_iters, progress.iteration
        )
    while progress.iteration < training.train_iters and not _enough_tokens(config, progress):
        _train_step(trainer, loop_start)
        trainer.saves.poll()
        if training.eval_interval and progress.iteration % training.eval_interval == 0:
            _evaluate(trainer, "validation")
        interval = config.checkpoint.save_interval
        if interval and progress.iteration % interval == 0:
            trainer.saves.save(progress, at_interval=True)
        standby.ask(trainer.saves.last_saved_step)
        reason = trainer.exits.reason(progress.iteration)
        if reason is not None:
            logger.info("stopping after iteration %d: %s", progress.iteration, reason)
            trainer.stopped = True
            trainer.saves.save(progress)
            return
    _evaluate(trainer, "validation")
    _evaluate(trainer, "test")
    trainer.saves.save(progress)


def _enough_tokens(config: Config, progress: Progress) -> bool:
    limit = config.training.train_tokens
    return limit is not None and progress.consumed_train_samples * config.model.seq_length >= limit


def _begin_iteration(trainer: Trainer) -> int:
    """Set the size of the next batch in DeepSpeed and the schedule. Returns it, in samples over all ranks."""
    progress, engine = trainer.progress, trainer.engine
    batch_size = trainer.config.training.batch_sizes.at(progress.consumed_train_samples)
    if batch_size != engine.train_batch_size():
        from megatron.startup.engine_setup import set_batch_size

        logger.info("iteration %d: the global batch size is %d now", progress.iteration + 1, batch_size)
        set_batch_size(engine, batch_size, trainer.config.parallel.ds_sequence_parallel_size)
    engine.lr_scheduler.begin_iteration(batch_size, progress.consumed_train_samples)
    if engine.module.auxiliary_loss is not None:
        loss_scale = engine.optimizer.loss_scale if trainer.config.model.fp16 else 1.0
        engine.module.auxiliary_loss.begin_iteration(loss_scale, engine.gradient_accumulation_steps())
    return batch_size


def _train_step(trainer: Trainer, loop_start: int) -> None:
    progress, engine = trainer.progress, trainer.engine
    trainer.profiler.begin_step(progress.iteration + 1)
    batch_size = _begin_iteration(trainer)
    start = now_ns()
    trainer.saves.begin_step(start)
    skipped_before = engine.skipped_steps
    with UnderWay(RANKS, "training step", str(progress.iteration + 1)):
        # Reading the loss waits for the device. DeepSpeed has already broadcast it to all stages.
        loss = float(engine.train_batch(data_iter=trainer.data.train))
    progress.iteration += 1
    progress.consumed_train_samples += batch_size
    in_process_restart.note_step()
    end = now_ns()
    trainer.profiler.end_step(progress.iteration)
    trainer.startup.iteration_done(progress.iteration, loop_start, end)
    trainer.recorder.iteration(progress.iteration, start, end, loss)
    trainer.errors.passed(progress.iteration)
    skipped = engine.skipped_steps > skipped_before
    statistics = trainer.statistics.measure(progress.iteration)
    took_s = (end - start) / 1e9
    trainer.log.iteration(engine, progress, loss, took_s, skipped, statistics)
    trainer.exits.stop_time.compare(took_s, trainer.saves.took_s, asynchronous=trainer.saves.asynchronous)
    if engine.flops_profiler_enabled() and trainer.config.parallel.zero_stage == 1:
        from megatron.startup.engine_setup import report_flops

        report_flops(engine)


def _evaluate(trainer: Trainer, split: str) -> None:
    """Log the mean loss over --eval-iters batches of `split`, if it has any and nothing ends the run meanwhile."""
    data, training, progress = trainer.data, trainer.config.training, trainer.progress
    iterator, exists = (data.valid, data.has_valid) if split == "validation" else (data.test, data.has_test)
    if not exists:
        return
    total, size = 0.0, trainer.engine.train_batch_size()
    if split == "validation":  # all of them also if it ends early: a resume then evaluates on what comes next
        progress.consumed_valid_samples += training.eval_iters * size
    for number in range(training.eval_iters):
        reason = trainer.exits.reason_at_once()
        if reason is not None:
            done = f"after {number} of {training.eval_iters} batches"
            logger.info("the %s after iteration %d ends %s: %s", split, progress.iteration, done, reason)
            return
        with UnderWay(RANKS, "evaluation after iteration", str(progress.iteration)):
            total += float(trainer.engine.eval_batch(iterator))
    trainer.log.evaluation(total / training.eval_iters, progress, split)


def _shut_down(trainer: Trainer) -> None:
    """Wait for all ranks at the end, so that no rank's exit closes a connection that another still uses."""
    import torch.distributed as dist

    trainer.saves.close()
    trainer.profiler.close()
    trainer.log.close()
    sys.stdout.flush()
    if dist.is_initialized():
        with UnderWay(RANKS, "end of the run"):
            dist.barrier()
            dist.destroy_process_group()
