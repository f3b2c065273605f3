"""The command line: what parses, what it means, and what is refused with which words."""

from __future__ import annotations

import dataclasses
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.config import Config, ConfigError, padded_vocab_size
from megatron.config.arguments import (
    GROUPS,
    actions_of,
    build_parser,
    config_from_args,
    exit_with,
    namespace_from_config,
    parse_args,
)
from megatron.config.data import parse_split
from megatron.config.flags import spec_of
from megatron.config.model import POSITION_EMBEDDING_TYPES
from megatron.config.unsupported_flags import UNSUPPORTED

ROOT = Path(__file__).resolve().parents[4]

# A command line of the form that the restart study runs, minus the DeepSpeed file.
STUDY = """
--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --num-layers 32 --hidden-size 4096
--ffn-hidden-size 14336 --num-attention-heads 32 --num-key-value-heads 8 --micro-batch-size 2
--global-batch-size 16 --seq-length 2048 --max-position-embeddings 2048 --train-iters 15
--save /ckpt --load /ckpt --load-tag global_step5 --data-path /data/text_document
--vocab-file /data/vocab.json --merge-file /data/merges.txt --tokenizer-model /data/tokenizer.model
--data-impl mmap --tokenizer-type GPT2BPETokenizer --split 949,50,1 --distributed-backend nccl
--lr 3e-4 --lr-decay-style cosine --min-lr 3e-5 --weight-decay 0.1 --clip-grad 1 --lr-warmup-iters 1
--optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --log-interval 1 --save-interval 5
--eval-interval 1000 --eval-iters 0 --bf16 --no-query-key-layer-scaling --attention-dropout 0
--hidden-dropout 0 --use-rotary-position-embeddings --untie-embeddings-and-output-weights --swiglu
--normalization rmsnorm --disable-bias-linear --deepspeed --exit-interval 200
--exit-duration-in-mins 60 --zero-stage=1 --checkpoint-activations --deepspeed-activation-checkpointing
--seed 7 --tensorboard-dir /tb --no-save-optim --no-load-optim --no-load-rng
--exit-on-missing-checkpoint --make-vocab-size-divisible-by 128 --num-workers 0
"""
SMALL = """
--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 2
--train-iters 10 --lr 1e-3 --data-path /data/text --tokenizer-type NullTokenizer --vocab-size 500
"""


def configure(line: str, world_size: int = 1, **env: str) -> Config:
    place = {"RANK": "0", "WORLD_SIZE": str(world_size), "LOCAL_RANK": "0"} | env
    return config_from_args(parse_args(shlex.split(line), place), place)


def small(extra: str = "", world_size: int = 1) -> Config:
    return configure(SMALL + extra, world_size)


def test_study_command_line_means_what_it_says() -> None:
    config = configure(STUDY, world_size=16)
    model, parallel, training = config.model, config.parallel, config.training
    assert (model.num_layers, model.hidden_size, model.ffn_hidden_size) == (32, 4096, 14336)
    assert (model.num_attention_heads, model.num_key_value_heads, model.kv_channels) == (32, 8, 128)
    assert (model.normalization, model.swiglu, model.add_bias_linear) == ("rmsnorm", True, False)
    assert (model.use_rotary_position_embeddings, model.add_position_embedding) == (True, False)
    assert (model.params_dtype, model.bf16, model.fp16) == ("bf16", True, False)
    assert (model.attention_dropout, model.hidden_dropout) == (0.0, 0.0)
    assert model.checkpoint_activations and parallel.deepspeed_activation_checkpointing
    assert (parallel.data_parallel_size, parallel.distributed_backend, parallel.zero_stage) == (2, "nccl", 1)
    assert (training.num_micro_batches, training.seed, training.exit_interval) == (4, 7, 200)
    assert training.exit_duration_in_mins == 60 and training.accumulate_allreduce_grads_in_fp32
    assert (config.optimizer.lr_decay_iters, config.optimizer.warmup_iters) == (15, 1)
    assert config.data.split_fractions == (0.949, 0.05, 0.001)
    assert config.checkpoint.load_tag == "global_step5"
    assert config.checkpoint.no_save_optim and config.checkpoint.no_load_optim and config.checkpoint.no_load_rng
    assert config.trace.restart_trace_dir == "/ckpt/restart_trace"
    texts = [note.text for note in config.notes]
    assert any(text.startswith("--no-query-key-layer-scaling: no effect") for text in texts)
    assert "--tokenizer-model is not read by --tokenizer-type GPT2BPETokenizer" in texts


def test_defaults_are_upstreams() -> None:
    config = small()
    model, optimizer, training = config.model, config.optimizer, config.training
    assert (model.ffn_hidden_size, model.num_key_value_heads, model.kv_channels) == (256, 4, 16)
    assert (model.max_position_embeddings, model.normalization, model.params_dtype) == (64, "layernorm", "fp32")
    assert (model.attention_dropout, model.hidden_dropout, model.init_method_std) == (0.1, 0.1, 0.02)
    assert (optimizer.weight_decay, optimizer.clip_grad, optimizer.adam_beta2) == (0.01, 1.0, 0.999)
    assert (optimizer.lr_decay_style, optimizer.start_weight_decay) == ("linear", 0.01)
    assert (training.global_batch_size, training.seed, training.log_interval) == (2, 1234, 100)
    assert (training.eval_interval, training.eval_iters, training.exit_interval) == (1000, 100, None)
    assert config.data.split == "969, 30, 1" and config.data.num_workers == 2
    assert config.checkpoint.checkpoint_durability == "fsync" and config.checkpoint.keep_last is None
    assert config.trace.restart_trace_dir is None
    assert small("--swiglu").model.ffn_hidden_size == int((4 * 64 * 2 / 3) / 64) * 64
    assert (model.gelu_approximate, small("--no-bias-gelu-fusion").model.gelu_approximate) == ("tanh", "none")


def test_all_ways_to_say_which_position_embeddings_agree() -> None:
    kinds = {
        "": "absolute", "--use-rotary-position-embeddings": "rotary", "--no-position-embedding": "none",
        "--use-rotary-position-embeddings --no-position-embedding": "rotary",
        "--position-embedding-type alibi --no-position-embedding": "alibi",
        **{f"--position-embedding-type {kind}": kind for kind in POSITION_EMBEDDING_TYPES},
    }  # fmt: skip
    for flags, kind in kinds.items():
        model = small(flags).model
        assert (model.position_embedding_type, model.uses_alibi) == (kind, kind == "alibi")
        assert (model.use_rotary_position_embeddings, model.add_position_embedding) == (
            kind == "rotary",
            kind == "absolute",
        )
        assert dataclasses.replace(model) == model


def test_every_flag_reaches_a_field() -> None:
    fields = {field.name for cls in GROUPS.values() for field in dataclasses.fields(cls)}
    dests = {action.dest for action in actions_of(build_parser()).values()}
    assert dests - fields == {"help", "version", "bf16", "fp16", "no_effect"}
    assert len(fields) == sum(len(dataclasses.fields(cls)) for cls in GROUPS.values())
    # data_parallel_size is a copy, not a flag, and library_options are keys of --deepspeed_config; zero_stage_asked is
    # what --zero-stage was before it became 1; the rest comes from the environment or from --bf16 and --fp16.
    assert fields - dests == {
        "params_dtype", "world_size", "rank", "data_parallel_size", "library_options", "zero_stage_asked",
    }  # fmt: skip


@pytest.mark.slow
def test_every_flag_has_help_and_every_dataclass_default_survives() -> None:
    for action in actions_of(build_parser()).values():
        assert action.help
        assert action.dest not in parse_args([], {})
    assert vars(parse_args([], {})) == {}


@pytest.mark.parametrize("cls", GROUPS.values(), ids=GROUPS)
def test_each_flag_changes_its_own_field(cls: type) -> None:
    sample = {"int": "3", "float": "0.5", "str": "x", "tuple[str, ...]": "x", "tuple[int, ...]": "3"}
    for field in dataclasses.fields(cls):
        spec = spec_of(field)
        if spec is None:
            continue
        for name in spec.names:
            kind = str(field.type).removesuffix(" | None")
            value = [] if spec.parse is None else ["off" if kind == "bool" else sample[kind]]
            parsed = vars(parse_args([name, *value], {}))
            assert list(parsed) == [field.name]
            assert parsed[field.name] != field.default


def test_every_upstream_flag_is_answered_by_name() -> None:
    golden = Path(__file__).parents[3] / "golden" / "upstream_flags.txt"
    known = set(actions_of(build_parser()))
    upstream = set(golden.read_text().split())
    assert len(upstream) == 316
    assert sorted(upstream - known - set(UNSUPPORTED)) == []
    assert not known & set(UNSUPPORTED)


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_unsupported_flag_is_refused_with_the_way_out(name: str) -> None:
    with pytest.raises(ConfigError, match="is not supported: ") as caught:
        parse_args([name, "1"], {})
    assert name in str(caught.value) and UNSUPPORTED[name] in str(caught.value)


def test_all_unknown_flags_are_named_in_one_message() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_args(["--tensor-model-paralel-size", "2", "--kd", "--zzz", "--lr", "1"], {})
    assert str(caught.value).split("\n") == [
        "unknown flag --tensor-model-paralel-size: did you mean --tensor-model-parallel-size?",
        f"--kd is not supported: {UNSUPPORTED['--kd']}",
        "unknown flag --zzz: --help lists all flags",
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--num-lay 3", "unknown flag --num-lay"),
        ("stray", "unexpected argument stray"),
        ("--num-layers four", "--num-layers: invalid int value: 'four'"),
        ("--restart-trace maybe", "--restart-trace: expected on or off, got 'maybe'"),
        ("--save", "--save: expected one argument"),
    ],
)
def test_unparsable_words(line: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_args(shlex.split(line), {})
    assert message in str(caught.value)


def test_missing_required_flags_are_all_named() -> None:
    with pytest.raises(ConfigError) as caught:
        configure("--num-layers 4")
    for name in (
        "--hidden-size",
        "--seq-length",
        "--micro-batch-size",
        "--train-iters or --train-samples",
        "--lr",
        "--data-path",
        "--tokenizer-type",
    ):
        assert name in str(caught.value)
    assert "--num-layers" not in str(caught.value)


EXPORTS = "--save /s --save-interval 2 --export-hf-interval "
REFUSALS = [
    # extra flags, world size, what the message must contain
    ("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", 6, "2 = 4 does not divide the"),
    ("--tensor-model-parallel-size 4", 2, "does not divide the world size 2"),
    ("--num-attention-heads 6 --hidden-size 96 --tensor-model-parallel-size 4", 4, "-heads 6: not div"),
    ("--num-key-value-heads 1 --tensor-model-parallel-size 2", 2, "-key-value-heads 1: not divisible"),
    ("--ffn-hidden-size 129 --tensor-model-parallel-size 2", 2, "--ffn-hidden-size 129: not divisible"),
    ("--make-vocab-size-divisible-by 0", 1, "--make-vocab-size-divisible-by 0: must be at least 1"),
    ("--pipeline-model-parallel-size 8", 8, "--num-layers 4: is less than --pipeline-model-"),
    ("--global-batch-size 6", 2, "--global-batch-size 6: not divisible by --micro-batch-size 2 x"),
    ("--micro-batch-size 0", 1, "--micro-batch-size 0: must be at least 1"),
    ("--seed 2147483649", 1, "--seed 2147483649: ranks add their places to it, and NumPy takes seeds below 2^32"),
    ("--hidden-size 65", 1, "--hidden-size 65: not divisible by --num-attention-heads 4"),
    ("--num-key-value-heads 3", 1, "--num-key-value-heads 3: must divide --num-attention-heads 4"),
    ("--max-position-embeddings 32", 1, "--max-position-embeddings 32: is less than --seq-length 64"),
    ("--rotary-percent 0.5", 1, "--rotary-percent 0.5: add --use-rotary-position-embeddings"),
    ("--rotary-position-embeddings-theta 5", 1, "-theta 5: add --use-rotary-position-embeddings"),
    ("--use-rotary-position-embeddings --rotary-percent 0.2", 1, "rotates 3 channels"),
    (
        "--position-embedding-type alibi --use-rotary-position-embeddings",
        1,
        "--position-embedding-type alibi: --use-rotary-position-embeddings says otherwise; drop one",
    ),
    (
        "--position-embedding-type absolute --no-position-embedding",
        1,
        "--position-embedding-type absolute: --no-position-embedding says otherwise; drop one",
    ),
    ("--position-embedding-type alibi --rotary-percent 0.5", 1, "0.5: add --use-rotary-position-embeddings"),
    ("--position-embedding-type rope", 1, "rope: choose one of absolute, rotary, alibi, none"),
    ("--embed-layernorm --normalization rmsnorm", 1, "--embed-layernorm is a LayerNorm, and --normalization rmsnorm"),
    ("--num-experts 4 8 4", 1, "--num-experts 4 8 4: give one number, or one for each of the 2 layers with experts"),
    ("--num-experts 0", 1, "--num-experts 0: each must be at least 1"),
    ("--num-experts 4 --expert-interval 9", 1, "--expert-interval 9: is more than --num-layers 4, so no layer has"),
    ("--num-experts 4 4 --expert-interval 9", 1, "--expert-interval 9: is more than --num-layers 4, so no layer has"),
    ("--num-experts 4 --moe-eval-capacity-factor inf", 1, "--moe-eval-capacity-factor inf: must be a finite number"),
    ("--host-cache-size inf", 1, "--host-cache-size inf: must be a finite number"),
    ("--clip-grad inf", 1, "--clip-grad inf: must be a finite number"),
    ("--clip-grad nan", 1, "--clip-grad nan: must be"),
    ("--num-experts 4 --topk 3", 1, "--topk 3: a token goes to 1 or 2 experts"),
    ("--mlp-type residual", 1, "--mlp-type residual: the model is dense; give --num-experts N, more than 1"),
    (
        "--num-experts 4 --sequence-parallel --tensor-model-parallel-size 2",
        2,
        "--num-experts 4: a gate sees whole sequences, and --sequence-parallel splits them over TP; drop one of them",
    ),
    (
        "--num-experts 4 --torch-compile --attention-dropout 0 --hidden-dropout 0",
        1,
        "--num-experts 4: --torch-compile compiles no mixture of experts; drop one of them",
    ),
    ("--attention-dropout 1.0", 1, "--attention-dropout 1.0: must be in [0, 1)"),
    ("--checkpoint-num-layers 2", 1, "--checkpoint-num-layers 2: add --checkpoint-activations"),
    ("--deepspeed-activation-checkpointing", 1, "add --checkpoint-activations"),
    ("--checkpoint-activations --partition-activations", 1, "without --deepspeed-activation-checkpointing"),
    (
        "--checkpoint-activations --deepspeed-activation-checkpointing --checkpoint-in-cpu",
        1,
        "--checkpoint-in-cpu does nothing without --partition-activations",
    ),
    ("--bf16 --fp16", 1, "--bf16 and --fp16 exclude each other"),
    ("--normalization batchnorm", 1, "--normalization batchnorm: choose one of layernorm, rmsnorm"),
    ("--zero-stage 4", 1, "--zero-stage 4: is no stage of ZeRO; use 1, or 3"),
    ("--zero-stage 3 --tensor-model-parallel-size 2", 2, "-size 2: --zero-stage 3 divides the weights over all ranks"),
    ("--zero-stage 3 --pipeline-model-parallel-size 2", 2, "-size 2: --zero-stage 3 divides the weights over all rank"),
    ("--zero-stage 3 --num-experts 4", 1, "--num-experts 4: --zero-stage 3 divides no experts; drop it, or use"),
    ("--zero-stage 3 --checkpoint-engine dcp", 1, "--checkpoint-engine dcp: --zero-stage 3 saves with torch, lazy or"),
    *(
        (f"--zero-stage 3 --attention-dropout 0 --hidden-dropout 0 --load /l --save /s --save-interval 1 {flag}", 1,
         f"{flag.split()[0]}: ")
        for flag in (
            "--warmup-kernels", "--torch-compile", "--log-params-norm", "--log-num-zeros-in-grad", "--no-save-optim",
            "--universal-checkpoint", "--ckpt-fully-parallel-load", "--export-hf-interval 1",
        )
    ),
    ("--cpu-optimizer --bf16", 1, "--cpu-optimizer: with --bf16 at ZeRO stage 1 DeepSpeed adds gradients up in bf16"),
    ("--cpu-optimizer --num-experts 4 --moe-expert-parallel-size 2", 2, "not tried with --moe-expert-parallel-size 2"),
    ("--cpu-optimizer --optimizer sgd", 1, "--optimizer sgd: --cpu-optimizer is for adam; drop one of the flags"),
    ("--distributed-backend ccl", 1, "--distributed-backend ccl: choose one of nccl, gloo"),
    ("--distributed-timeout-minutes 0", 1, "--distributed-timeout-minutes 0.0: must be from 0.01, which is 0.6 s"),
    ("--distributed-timeout-minutes nan", 1, "--distributed-timeout-minutes nan: must be a finite number"),
    ("--distributed-timeout-minutes inf", 1, "--distributed-timeout-minutes inf: must be a finite number"),
    ("--lr-warmup-iters 10", 1, "--lr-warmup-iters 10: must be less than the 10 iterations of the decay"),
    ("--lr-warmup-iters 1 --lr-warmup-fraction 0.1", 1, "both set the warm-up"),
    ("--min-lr 1", 1, "--min-lr 1.0: is above --lr 0.001"),
    ("--weight-decay-incr-style linear", 1, "give --start-weight-decay and --end-weight-decay"),
    ("--start-weight-decay 0.5", 1, "--start-weight-decay 0.5: add --weight-decay-incr-style"),
    ("--override-opt_param-scheduler --use-checkpoint-opt_param-scheduler", 1, "contradict each other"),
    ("--initial-loss-scale 3 --fp16", 1, "--initial-loss-scale 3.0: must be a power of two"),
    ("--log-timers-to-tensorboard", 1, "--log-timers-to-tensorboard does nothing without --tensorboard-dir DIR"),
    ("--train-data-path /b", 1, "--data-path and --train-data-path exclude each other"),
    ("--data-path 0.3 /a 0.7", 1, "--data-path 0.3 /a 0.7: give one path prefix, or pairs"),
    ("--data-path /a /b", 1, "expected a weight before /b, got /a"),
    ("--data-path 0 /b", 1, "the weight 0 of /b must be positive"),
    ("--split 0,1,0", 1, "--split 0,1,0: parts must not be negative"),
    ("--split a,b", 1, "--split a,b: expected numbers separated by commas"),
    ("--data-impl lazy", 1, "--data-impl lazy: choose one of mmap, infer"),
    ("--tokenizer-type BertWordPieceCase", 1, "Case: choose one of GPT2BPETokenizer"),
    ("--tokenizer-type GPT2BPETokenizer --vocab-file v", 1, "GPT2BPETokenizer: needs --merge-file"),
    ("--save /s", 1, "--save /s: add --save-interval N"),
    ("--keep-last 2", 1, "--keep-last 2: does nothing without --save DIR"),
    ("--export-hf-interval 2", 1, "--export-hf-interval 2: does nothing without --save DIR"),
    ("--export-hf-dir /e", 1, "--export-hf-dir /e: does nothing without --export-hf-interval N"),
    ("--export-hf-wait 0", 1, "--export-hf-wait 0.0: does nothing without --export-hf-interval N"),
    (EXPORTS + "5", 1, "--export-hf-interval 5: must be a multiple of 2 (--save-interval 2)"),
    ("--save x --save-interval 1 --checkpoint-files-per-node 1", 1,
     "--checkpoint-files-per-node 1: --checkpoint-engine torch has no files that ranks share; use lazy, or drop the"),
    ("--save s3://bucket/p --save-interval 1 --checkpoint-engine lazy --checkpoint-files-per-node 1", 1,
     "--checkpoint-files-per-node 1: --save s3://bucket/p is object storage, where only one rank can write an object"),
    ("--checkpoint-engine lazy --checkpoint-files-per-node 1", 1, "--checkpoint-files-per-node 1: "),
    ("--save x --save-interval 1 --checkpoint-compression zstd", 1,
     "--checkpoint-compression zstd: --checkpoint-engine torch writes no compressed files; use lazy, or drop the flag"),
    ("--save x --save-interval 1 --checkpoint-engine lazy --checkpoint-files-per-node 1 --checkpoint-compression zstd",
     1, "--checkpoint-compression zstd: --checkpoint-files-per-node 1: ranks that share a file must know where each"),
    ("--checkpoint-engine lazy --checkpoint-compression zstd", 1, "--checkpoint-compression zstd: does nothing with"),
    (EXPORTS + "2 --checkpoint-engine memory --persist-interval 3", 1,
     "-interval 2: must be a multiple of 6 (--save-interval 2 x --persist-interval 3, which are on storage)"),
    (EXPORTS + "2 --checkpoint-engine none", 1, "-interval 2: --checkpoint-engine none writes nothing to export"),
    (EXPORTS + "2 --save s3://bucket/run --restart-trace off", 1, "--save s3://bucket/run is none; give"),
    (EXPORTS + "2 --export-hf-dir s3://bucket/p", 1, "-dir s3://bucket/p: exports are written to a directory"),
    ("--save /s --save-interval 1 --keep-last 0", 1, "--keep-last 0: must be at least 1"),
    ("--no-load-optim", 1, "--no-load-optim does nothing without --load DIR"),
    ("--load /s --load-tag a/b", 1, "--load-tag a/b: must name one directory inside --load"),
    ("--checkpoint-durability maybe", 1, "--checkpoint-durability maybe: choose one of fsync, none"),
    ("--restart-trace off --restart-trace-dir /t", 1, "does nothing with --restart-trace off"),
    ("--restart-trace off --trace-probes-interval 1", 1, "-interval 1.0: does nothing with --restart-trace off; drop"),
    ("--restart-trace off --otlp http://c", 1, "--otlp http://c: does nothing with --restart-trace off; drop one"),
    ("--otlp http://c:4318", 1, "--otlp http://c:4318: sends the restart trace, and none is written; give --save or"),
    ("--restart-trace-probes off --trace-probes-interval 1", 1, "does nothing with --restart-trace-probes off; drop"),
    ("--trace-probes-interval nan", 1, "--restart-trace-probes-interval nan: must be in [0.01, 3600)"),
    ("--trace-probes-interval inf", 1, "--restart-trace-probes-interval inf: must be in [0.01, 3600)"),
    ("--trace-probes-interval 0", 1, "--restart-trace-probes-interval 0.0: must be in [0.01, 3600)"),
    ("--torch-compile", 1, "--hidden-dropout 0.1: --torch-compile compiles no dropout"),
    ("--torch-compile --hidden-dropout 0", 1, "--attention-dropout 0.1: --torch-compile compiles no dropout"),
    (
        "--torch-compile --hidden-dropout 0 --attention-dropout 0 --recompute-activations",
        1,
        "--recompute-granularity selective (or --recompute-activations) says so, too: use full",
    ),
    ("--local_rank 3", 1, "--local_rank 3 contradicts LOCAL_RANK 0"),
    ("--profile pt", 1, "--profile pt: has no directory to write to; give --tensorboard-dir or --restart-trace-dir"),
    ("--profile nsys", 1, "--profile nsys: choose one of pt, pt-full"),
    ("--profile_steps 2,3", 1, "--profile_steps 2,3: does nothing without --profile pt: add it or drop the flag"),
    ("--profile-ranks 0", 1, "--profile-ranks 0: does nothing without --profile pt"),
    ("--restart-trace-dir /t --profile pt --profile_steps 3,2", 1, "--profile_steps 3,2: give the first and the last"),
    ("--restart-trace-dir /t --profile pt --profile_steps 0,2", 1, "--profile_steps 0,2: give the first and the last"),
    ("--restart-trace-dir /t --profile pt --profile_steps 2", 1, "--profile_steps 2: give the first and the last step"),
    ("--restart-trace-dir /t --profile pt --profile-ranks 0 2", 2, "-ranks 2: there is no such rank; the last is 1"),
]  # fmt: skip


@pytest.mark.parametrize(("extra", "world_size", "message"), REFUSALS, ids=[row[0] for row in REFUSALS])
def test_refusal_names_flag_value_and_fix(extra: str, world_size: int, message: str) -> None:
    small(world_size=1)  # the base line is fine, so that the extra flags are what is refused
    with pytest.raises(ConfigError) as caught:
        small(extra, world_size)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK 'x': the launcher must set a whole number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK 2: must be in [0, WORLD_SIZE 2)"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2 but RANK is not set"),
        ({"RANK": "3"}, "RANK is 3 but WORLD_SIZE is not set"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_SIZE is 4 but WORLD_SIZE is not set"),
    ],
)
def test_launcher_environment_is_checked(env: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_args(parse_args(shlex.split(SMALL), {}), env)
    assert message in str(caught.value)


def test_single_process_without_a_launcher() -> None:
    parallel = config_from_args(parse_args(shlex.split(SMALL), {}), {}).parallel
    assert (parallel.world_size, parallel.rank, parallel.local_rank) == (1, 0, 0)


def test_launcher_spellings_of_local_rank_and_deepspeed_config(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text("{}")
    for rank_flag, config_flag in (("--local_rank=0", "--deepspeed_config"), ("--local-rank 0", "--deepspeed-config")):
        assert small(f"{rank_flag} {config_flag} {file}").parallel.deepspeed_config == str(file)


def test_later_value_of_a_flag_wins_as_upstream() -> None:
    assert small("--lr 5e-4").optimizer.lr == 5e-4


def test_blend_weights_and_split() -> None:
    data = small("--data-path 1 /a 3 /b").data
    assert data.blend("data_path") == [(0.25, "/a"), (0.75, "/b")]
    assert data.prefixes == [("--data-path", "/a"), ("--data-path", "/b")]
    assert parse_split("90/10") == (0.9, 0.1, 0.0)
    assert parse_split("100,0,0") == (1.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("size", "divisor", "tp", "padded"), [(500, 128, 2, 512), (50257, 128, 4, 50688), (8, 8, 1, 8)]
)
def test_padded_vocabulary(size: int, divisor: int, tp: int, padded: int) -> None:
    assert padded_vocab_size(size, divisor, tp) == padded


def test_groups_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        small().model.num_layers = 3  # type: ignore[misc]


def test_replacing_a_group_keeps_the_checks() -> None:
    config = small()
    again = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, save="/s", save_interval=1))
    assert again.trace.restart_trace_dir == "/s/restart_trace"
    with pytest.raises(ConfigError, match="--num-layers 4"):
        dataclasses.replace(
            config, parallel=dataclasses.replace(config.parallel, world_size=8, pipeline_model_parallel_size=8)
        )


def test_namespace_has_upstreams_names() -> None:
    args = namespace_from_config(configure(STUDY, world_size=16))
    assert (args.bf16, args.fp16) == (True, False)
    assert (args.tensor_model_parallel_size, args.data_parallel_size, args.world_size) == (4, 2, 16)
    assert args.data_path == ["/data/text_document"] and args.train_data_path is None
    assert (args.rope_theta, args.add_bias_linear, args.lr_decay_iters) == (10000, False, 15)


@pytest.mark.parametrize(("rank", "expected"), [(0, "error: --x 1: no\n"), (1, "")])
def test_only_rank_0_speaks(rank: int, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        exit_with(ConfigError("--x 1: no"), rank, wait_s=0.0)
    assert caught.value.code == 2
    assert capsys.readouterr().err == expected


def run_python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    base = {"PATH": os.environ.get("PATH", ""), "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", code], env=base | env, capture_output=True, text=True, timeout=300)


def test_parse_or_exit_in_a_real_process() -> None:
    code = "from megatron.config.arguments import parse_or_exit; parse_or_exit(['--num-layers', '0', '--zzz'])"
    result = run_python(code, RANK="0", WORLD_SIZE="1")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "error: unknown flag --zzz: --help lists all flags\n"


def test_help_is_printed_by_rank_0_only() -> None:
    code = "from megatron.config.arguments import parse_or_exit; parse_or_exit(['--help'])"
    first, second = (run_python(code, RANK=rank, WORLD_SIZE="2") for rank in ("0", "1"))
    assert (first.returncode, second.returncode) == (0, 0)
    assert "--checkpoint-durability {fsync,none}" in first.stdout and second.stdout == ""


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, megatron.config.arguments, megatron.startup.preflight\n"
        "heavy = {'torch', 'deepspeed', 'numpy', 'pydantic'}\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} & heavy))"
    )
    assert run_python(code).stdout == "[]\n"


def test_parsing_is_fast() -> None:
    line = shlex.split(STUDY)
    durations = []
    env = {"RANK": "0", "WORLD_SIZE": "16"}
    for _ in range(7):
        start = time.thread_time()
        config_from_args(parse_args(line, env), env)
        durations.append(time.thread_time() - start)
    assert min(durations) < 0.3  # 0.01 s
