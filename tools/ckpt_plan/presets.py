"""Configurations of the presets of examples_deepspeed/restart_bench, as the scripts there would start them.

tools.restart_bench is the only source of the flags, which the trainer's own parser then reads. Imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron.config import Config, ConfigError, padded_vocab_size
from megatron.config.arguments import config_from_args, parse_args
from megatron.config.errors import require_at_least
from megatron.parallel.topology import Layout
from megatron.startup.preflight import check_tokenizer

from ..restart_bench.presets import SCRIPTED, Preset, model_names
from ..restart_bench.training import preset_flags

Planned = tuple[Config, Layout, tuple[int, int]]


def preset_layout(model: str) -> tuple[int, int]:
    """(TP, PP) of the preset's own script, run_MODEL_tpT_ppP*.sh; of several, the one with the fewest ranks.

    Raises ConfigError if there is no such preset, or it has no script of its own.
    """
    _check_preset(model)
    sizes = [(preset.tp, preset.pp) for preset in SCRIPTED if preset.model == model]
    if not sizes:
        raise ConfigError(f"--model {model}: this preset has no layout of its own; give --tp and --pp")
    return min(sizes, key=lambda size: size[0] * size[1])


def layout_of(model: str, tp: int | None, pp: int | None) -> tuple[int, int]:
    """(TP, PP) as given, of which one alone leaves the other at 1; without both that of the preset's own script.

    Raises ConfigError as `preset_layout`.
    """
    if tp is None and pp is None:
        return preset_layout(model)
    return (1 if tp is None else tp, 1 if pp is None else pp)


def _check_preset(model: str) -> None:
    if model not in model_names():
        raise ConfigError(f"--model {model}: no such preset; there are: {', '.join(model_names())}")


def config_for(
    model: str = "70b",
    tp: int = 8,
    pp: int = 8,
    dp: int = 1,
    vocab_size: int | None = None,
    *,
    flags: Sequence[str] = (),
) -> Planned:
    """(configuration of rank 0, layout, (vocabulary size, vocabulary size padded for TP)) of a preset.

    `vocab_size`: of the tokenizer, before padding; None: of the preset's own tokenizer. `flags` follow the preset's
    flags and override them, as EXTRA_ARGS does; without them no activations are recomputed
    (recomputation.preset_for chooses). Raises ConfigError naming flag, value and fix.
    """
    _check_preset(model)
    for flag, value in (("--tp", tp), ("--pp", pp), ("--dp", dp), ("--vocab-size", vocab_size)):
        require_at_least(flag, value, 1)
    argv = preset_flags(Preset(model, tp, pp), dp)
    own_vocabulary = _vocab_size_of(argv)
    if vocab_size is not None and own_vocabulary is not None:
        argv += ["--vocab-size", str(vocab_size - 1)]  # NullTokenizer adds the end of a document
    return config_from_flags([*argv, *flags], dp, vocab_size or own_vocabulary or _corpus_vocab_size())


def config_from_flags(argv: Sequence[str], dp: int, vocab_size: int | None) -> Planned:
    """As config_for, from flags of pretrain_gpt.py; `vocab_size` None: of the tokenizer that they name.

    Raises ConfigError, or TokenizerError if the tokenizer's files are not there.
    """
    require_at_least("--dp", dp, 1)
    require_at_least("--vocab-size", vocab_size, 1)
    args = parse_args(argv, {})
    tp = getattr(args, "tensor_model_parallel_size", 1)
    pp = getattr(args, "pipeline_model_parallel_size", 1)
    require_at_least("--tensor-model-parallel-size", tp, 1)
    require_at_least("--pipeline-model-parallel-size", pp, 1)
    layout = Layout(tp, pp, dp, getattr(args, "moe_expert_parallel_size", 1))
    places = {"WORLD_SIZE": str(layout.world_size), "RANK": "0", "LOCAL_RANK": "0"}
    config = config_from_args(args, places)
    if vocab_size is None:
        vocab_size, _ = check_tokenizer(config.data)
    padded = padded_vocab_size(vocab_size, config.model.make_vocab_size_divisible_by, tp)
    return config, layout, (vocab_size, padded)


def _vocab_size_of(argv: Sequence[str]) -> int | None:
    """Size of a NullTokenizer's vocabulary; None for another tokenizer."""
    if "NullTokenizer" not in argv:
        return None
    return int(argv[argv.index("--vocab-size") + 1]) + 1


def _corpus_vocab_size() -> int:
    """Vocabulary size of the tokenizer that the tiny preset trains on its corpus."""
    from ..build_corpus import parse_arguments

    return parse_arguments(["--output-dir", "."])[1].vocab_size
