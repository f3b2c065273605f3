"""The presets: sizes of models, and the layouts that have a script of their own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .errors import SettingsError
from .places import SCRIPTS


@dataclass(frozen=True)
class Model:
    """Sizes of a model. `defaults`: settings in which it differs from the others; `runs_on_cpu`: as it is."""

    hidden_size: int
    ffn_hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    defaults: Mapping[str, str] = field(default_factory=dict)
    runs_on_cpu: bool = False


MODELS = {
    # LLaMA-style in miniature: eight ranks on two CPU cores do an iteration in well under a second.
    "tiny": Model(
        128,
        344,
        4,
        4,
        2,
        {"SEQ_LENGTH": "128", "MICRO_BATCH": "2", "ITERS": "12", "SAVE_INTERVAL": "5"},
        runs_on_cpu=True,
    ),
    "1b": Model(2048, 5632, 22, 32, 4),  # after TinyLlama-1.1B
    "3b": Model(3072, 8192, 28, 24, 8),  # after Llama-3.2-3B
    "7b": Model(4096, 14336, 32, 32, 8),  # after Mistral-7B
    "llama7b": Model(4096, 11008, 32, 32, 32),  # after LLaMA-7B
    "13b": Model(5120, 13824, 40, 40, 40),  # after Llama-2-13B
    "llama30b": Model(6656, 17920, 60, 52, 52),  # after LLaMA-33B, which some call 30B
    "33b": Model(6656, 17920, 60, 52, 4),  # after DeepSeek-33B, with fewer key/value heads
    "llama65b": Model(8192, 22016, 80, 64, 64),  # after LLaMA-65B
    "70b": Model(8192, 28672, 80, 64, 8, {"SEQUENCE_PARALLEL": "1"}),  # after Llama-3.3-70B
    "mlperf70b": Model(8192, 28672, 80, 128, 8),  # the 70B model of MLPerf Storage's checkpoint benchmark
    # After Llama-3.1-405B, as in MLPerf Storage's checkpoint benchmark. 126 layers on 32 stages: some hold one more.
    "405b": Model(16384, 53248, 126, 128, 8),
    # After the 1T model of MLPerf Storage's checkpoint benchmark. Its 192 heads and 32 key-value heads do not divide
    # its hidden size: with 168 and 24 the model has less than 1 % fewer parameters.
    "1t": Model(25872, 98304, 128, 168, 24),
}


@dataclass(frozen=True)
class Preset:
    """A model on a layout. `defaults`: settings in which its script differs from those of other presets."""

    model: str
    tp: int
    pp: int
    defaults: Mapping[str, str] = field(default_factory=dict)

    @property
    def sizes(self) -> Model:
        return MODELS[self.model]

    @property
    def name(self) -> str:
        return f"{self.model}_tp{self.tp}_pp{self.pp}" + (f"_dp{self.defaults['DP']}" if "DP" in self.defaults else "")


SCRIPTED = [
    Preset("tiny", 2, 2, {"DP": "2", "MODE": "restart"}),
    Preset("1b", 1, 1),
    Preset("3b", 4, 1),
    Preset("7b", 4, 2),
    Preset("13b", 4, 4),
    Preset("33b", 4, 8),
    Preset("70b", 8, 8),
    Preset("70b", 4, 20),
]
_SCRIPT = re.compile(r"run_(\w+)\.sh")
_LAYOUT = re.compile(r"(\w+)_tp([1-9]\d*)_pp([1-9]\d*)")


def scripted_names() -> list[str]:
    """Names of the presets with a script run_NAME.sh, sorted."""
    return sorted(preset.name for preset in SCRIPTED)


def preset_named(name: str) -> Preset | None:
    """The preset of this name: one with a script, or a model on another layout, MODEL_tpT_ppP; None: there is none."""
    for preset in SCRIPTED:
        if preset.name == name:
            return preset
    layout = _LAYOUT.fullmatch(name)
    if layout is None or layout[1] not in MODELS:
        return None
    return Preset(layout[1], int(layout[2]), int(layout[3]))


def preset_of_word(word: str) -> Preset | None:
    """The preset that a word names, by its name or by its script; None for another word.

    Raises SettingsError for the script of another checkout.
    """
    file = _SCRIPT.fullmatch(Path(word).name)
    if not file or not Path(word).is_file():
        return preset_named(word)
    preset = preset_named(file[1])
    own = SCRIPTS / f"run_{file[1]}.sh"
    if preset is not None and not (own.is_file() and own.samefile(word)):
        raise SettingsError(
            f"{word}: is not a script of this checkout, whose {preset.name} would be started; give {preset.name} for "
            f"that, or 'bash {word}' for the script"
        )
    return preset


def start_of(preset: Preset) -> list[str]:
    """The command by which a user, or a job, starts a preset."""
    if preset in SCRIPTED:
        return ["bash", str(SCRIPTS / f"run_{preset.name}.sh")]
    return ["bash", str(SCRIPTS / "run.sh"), preset.name]


# Of --tp and --pp of ckpt-plan and ckpt-replay (ckpt_plan.presets.layout_of)
LAYOUT_DEFAULT = "default without --tp and --pp: as the preset's script; with one of them: 1"


def model_names() -> list[str]:
    """All models, smallest first."""

    def size(name: str) -> tuple[float, str]:
        parameters = re.search(r"(\d+)([bt])$", name)
        return (float(parameters[1]) * (1000 if parameters[2] == "t" else 1) if parameters else 0.0), name

    return sorted(MODELS, key=size)


def largest_scripted(ranks: int) -> Preset | None:
    """The preset with a script that takes the most ranks, at most so many, with DP=1; None if none does."""
    fitting = [preset for preset in SCRIPTED if preset.tp * preset.pp <= ranks]
    # Of several the first by name
    return max(sorted(fitting, key=lambda preset: preset.name), key=lambda preset: preset.tp * preset.pp, default=None)
