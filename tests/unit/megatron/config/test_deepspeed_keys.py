"""The table of keys of a --deepspeed_config file: all of the installed DeepSpeed's are in it, none passes silently."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.config import Config, ConfigError
from megatron.config.deepspeed_config import build_deepspeed_config
from megatron.config.deepspeed_file import same
from megatron.config.deepspeed_keys import KEYS, Inert, Names, Off, Passes, Refused, Section, Settled
from tests.unit.megatron.config.test_deepspeed_config import BATCH, configure, with_file

# Prints what DeepSpeed's own parser asks a configuration for, as dotted names, and its models' fields with defaults.
ASK_DEEPSPEED = """
import enum, json
from pydantic import BaseModel
from deepspeed.autotuning.config import DeepSpeedAutotuningConfig
from deepspeed.runtime import config as ds, constants
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

asked, defaults = set(), {}

class Asked(dict):
    def __init__(self, content, prefix=""):
        self.prefix = prefix
        super().__init__({k: Asked(v, f"{prefix}{k}.") if isinstance(v, dict) else v for k, v in content.items()})
    def __copy__(self): return self
    def keys(self): return self
    def note(self, key):
        if isinstance(key, str): asked.add(self.prefix + key)
    def __contains__(self, key): self.note(key); return super().__contains__(key)
    def get(self, key, default=None): self.note(key); return super().get(key, default)

def fields(model, prefix):
    for name, field in model.model_fields.items():
        default = field.get_default(call_default_factory=True)
        default = default.value if isinstance(default, enum.Enum) else default
        for shown in {name, field.alias or name}:
            asked.add(prefix + shown)
            if default is None or isinstance(default, (bool, int, float, str)):
                defaults[prefix + shown] = default

SECTIONS = {
    "checkpoint": {"writer": {}, "parallel_write": {}}, "aio": {}, "data_types": {}, "timers": {"throughput": {}},
    "activation_checkpointing": {}, "flops_profiler": {}, "pipeline": {},
}
ds.DeepSpeedConfig(Asked({"train_batch_size": 1, **SECTIONS}))
asked.update(f"pipeline.{key}" for key in (*ds.get_pipeline_config({}), "use_reentrant"))
probe = {"zero_optimization": DeepSpeedZeroConfig, "hybrid_engine": ds.HybridEngineConfig, "compile": ds.CompileConfig}
full = ds.DeepSpeedConfig({"train_batch_size": 1, "comms_logger": {}})
probe |= {
    "fp16": type(full.float16_config), "bf16": type(full.bfloat16_config),
    "timers.throughput": type(full.timers_config), "comms_logger": type(full.comms_config.comms_logger),
    **{name: type(getattr(full.monitor_config, name)) for name in ("tensorboard", "wandb", "csv_monitor", "comet")},
}
for name, model in probe.items():
    assert issubclass(model, BaseModel)
    fields(model, name + ".")
for name in ("offload_param", "offload_optimizer"):
    model = DeepSpeedZeroConfig.model_fields[name].annotation.__args__[0]
    asked.update(f"zero_optimization.{name}.{field}" for field in model.model_fields)
asked.update(ds._REMOVED_TOP_LEVEL_CONFIG_KEYS)
asked.update(f"zero_optimization.{key}" for key in ds._REMOVED_ZERO_CONFIG_KEYS)
pairs = ((key, vars(constants)[key + "_DEFAULT"]) for key in dir(constants) if key + "_DEFAULT" in dir(constants))
for key, default in pairs:
    name = getattr(constants, key)
    if isinstance(name, str) and name in asked and "." not in name:
        defaults.setdefault(name, default)
print("RESULT" + json.dumps([sorted(asked), defaults]))
"""
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 10**20), st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8), st.sampled_from(["auto", "fp32", "fp8", "none", "Fail", {}, [], {"enabled": False}]),
    st.dictionaries(st.text(max_size=4), st.booleans(), max_size=2),
)  # fmt: skip
NAMES = st.one_of(st.sampled_from(sorted({part for key in KEYS for part in key.split(".")})), st.text(max_size=12))
BASE_FILE = {
    "train_batch_size": 8, "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "none"}},
    "fp16": {"enabled": False}, "checkpoint": {},
    "comms_logger": {"enabled": False}, "timers": {"throughput": {}}, "aio": {}, "data_types": {},
    "activation_checkpointing": {}, "pipeline": {}, "flops_profiler": {}, "csv_monitor": {},
    "curriculum_learning": {"enabled": False, "schedule_config": {"difficulty_step": 8}},
}  # fmt: skip


@pytest.fixture(scope="module")
def deepspeed_keys() -> tuple[set[str], dict[str, Any]]:
    result = subprocess.run([sys.executable, "-c", ASK_DEEPSPEED], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    asked, defaults = json.loads(result.stdout.rpartition("RESULT")[2])
    return set(asked), defaults


def has_rule(key: str) -> bool:
    """In the table, or inside a section that is accepted only while it is off, or not at all."""
    section, _, name = key.rpartition(".")
    while section and section not in KEYS:
        section, _, more = section.rpartition(".")
        name = f"{more}.{name}"
    rule = KEYS.get(section)
    if isinstance(rule, Off):
        return name in rule.keys
    return key in KEYS or isinstance(rule, Refused)


@pytest.mark.slow
def test_every_key_of_deepspeed_has_a_rule(deepspeed_keys: tuple[set[str], dict[str, Any]]) -> None:
    asked, _ = deepspeed_keys
    assert len(asked) > 190  # the question was understood
    assert {key for key in asked if not has_rule(key)} == {"bfloat16"}  # read as bf16


@pytest.mark.slow
def test_defaults_are_those_of_deepspeed(deepspeed_keys: tuple[set[str], dict[str, Any]]) -> None:
    """What is accepted because it changes nothing is what DeepSpeed takes itself."""
    _, defaults = deepspeed_keys
    ours = {key: rule.default for key, rule in KEYS.items() if isinstance(rule, Inert)}
    ours |= {key: rule.default for key, rule in KEYS.items() if isinstance(rule, Passes)}
    both = ours.keys() & defaults.keys()
    assert len(both) > 60
    # DeepSpeed decides this one by the stage; at stage 1 it is this.
    differing = {key for key in both if ours[key] is not None and not same(ours[key], defaults[key])}
    assert differing == {"zero_optimization.overlap_comm"} and defaults["zero_optimization.overlap_comm"] is None


def test_every_section_of_a_rule_is_there() -> None:
    for key in KEYS:
        section = key.rpartition(".")[0]
        assert not section or isinstance(KEYS[section], Section | Names), key


def places(tree: dict[str, Any], prefix: str = "") -> list[str]:
    """Dotted names of the objects in a nest, the outermost included, each with its dot."""
    found = [prefix]
    for name, value in tree.items():
        if isinstance(value, dict):
            found += places(value, f"{prefix}{name}.")
    return found


def result_of(tmp_path: Path, content: dict[str, Any]) -> tuple[Config, dict[str, Any]]:
    config = with_file(tmp_path, content)
    return config, build_deepspeed_config(config)


def explained(key: str, value: Any) -> bool:
    """Whether a value may change nothing: it says what holds anyway, or is in a section that is off."""
    rule = KEYS.get(key)
    if value is None or rule is None or isinstance(rule, Section):
        return True
    if isinstance(rule, Off | Refused | Names):
        return value in (False, {}) or (isinstance(value, dict) and value.get("enabled") is False)
    if isinstance(rule, Inert):
        text = isinstance(value, str) and isinstance(rule.default, str) and value.lower() == rule.default.lower()
        return value == "auto" or same(value, rule.default) or text
    return value in ("auto", False) or isinstance(rule, Settled)


@pytest.mark.slow
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.sampled_from(places(BASE_FILE)), name=NAMES, value=VALUES)
def test_nothing_passes_silently(tmp_path: Path, place: str, name: str, value: Any) -> None:
    """A key put anywhere is refused by its name, or has a rule and changes the run, or says what holds anyway."""
    content = copy.deepcopy(BASE_FILE)
    section: dict[str, Any] = content
    for part in filter(None, place.split(".")):
        section = section[part]
    section[name] = value
    key = place + name
    try:
        config, built = result_of(tmp_path, content)
    except ConfigError as error:
        assert f"--deepspeed_config {tmp_path / 'ds_config.json'}" in str(error)
        # A name that cannot be printed, be it only that of a key within this one, is shown escaped. `enabled` switches
        # its section on, which is then refused as a whole.
        named = place.rstrip(".") if name == "enabled" else key
        assert named in str(error) or ascii(key)[1:-1][:29] in str(error)
        return
    assert has_rule(key), f"{key} = {value!r} passed"
    base_config, base = result_of(tmp_path, BASE_FILE)
    assert built != base or config != base_config or explained(key, value), f"{key} = {value!r} did nothing"


@pytest.mark.parametrize("key", sorted(key for key, rule in KEYS.items() if isinstance(rule, Inert | Off | Refused)))
def test_what_has_no_effect_is_refused_by_name(tmp_path: Path, key: str) -> None:
    *sections, name = key.split(".")
    content: dict[str, Any] = {}
    section = content
    for part in sections:
        section = section.setdefault(part, {})
    rule = KEYS[key]
    section[name] = not rule.default if isinstance(rule, Inert) and isinstance(rule.default, bool) else "other"
    with pytest.raises(ConfigError) as caught:
        with_file(tmp_path, content)
    assert f": {key} is " in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"gradient_cliping": 1.0}, "unknown key gradient_cliping: did you mean gradient_clipping?"),
        ({"checkpoint": {"writter": {}}}, "unknown key checkpoint.writter: did you mean checkpoint.writer?"),
        ({"stage": 1}, "unknown key stage: did you mean zero_optimization.stage?"),
        ({"zero_optimization.stage": 1}, "a dot names no section; put stage into zero_optimization"),
        ({"data_types": {"params_dtype": "fp8"}}, "data_types.params_dtype: did you mean data_types.param_dtype?"),
        ({"data_types": {"param_dtype": "fp8"}}, "data_types.param_dtype is 'fp8'; it must be one of fp32, fp16, bf16"),
        ({"data_types": {"param_dtype": "bf16"}}, "param_dtype is 'bf16', but the fp32 run makes it 'fp32'"),
        ({"seed": 1}, "seed is not supported; drop it and use --seed"),
        ({"sequence_parallel_size": 2}, "only 1 is supported: use --ds-sequence-parallel-size"),
        ({"wall_clock_breakdown": True}, "prints every steps_per_print iterations; give that, too"),
        ({"dump_state": True}, 'writes to DeepSpeed\'s log at level info; give "log_level": "info", too'),
        ({"comms_logger": {"enabled": True}, "log_level": "info"}, 'nothing without "verbose": true'),
        ({"bf16": {"enabled": True}, "zero_optimization": {"reduce_bucket_size": 5}}, "BF16_Optimizer"),
        ({"bf16": {"immediate_grad_update": False}}, 'bf16.immediate_grad_update: no effect in fp32; give --bf16'),
        ({"bf16": {"enabled": True}, "fp16": {"hysteresis": 4}}, "fp16.hysteresis: no effect in bf16; give --fp16, or"),
        ({"curriculum_learning": {"enabled": False, "foo": 1}}, "unknown key curriculum_learning.foo"),
        (
            {"curriculum_learning": {"enabled": False, "schedule_config": {"difficulty_step": {"x": 1}}}},
            "unknown key curriculum_learning.schedule_config.difficulty_step.x",
        ),
        ({"activation_checkpointing": {"partition_activations": True}}, "--partition-activations does nothing without"),
        ({"steps_per_print": 0}, "steps_per_print is 0; it must be at least 1"),
        ({"fp16": {"enabled": True, "initial_scale_power": 5000}}, "scale_power is 5000; it must be at most 127"),
        ({"fp16": {"loss_scale": -1}}, "fp16.loss_scale is -1; it must be at least 0"),
        ({"train_batch_size": True}, "train_batch_size is True; it must be a number"),
        ({"train_batch_size": 10**30}, "a number of more than 19 digits; it must be less than 2^63"),
        ({"prescale_gradients": 1}, "prescale_gradients is 1; use true or false"),
        ({"\x1b[2Jx": 1}, "unknown key '\\x1b[2Jx'"),
        ({"async_ckpt_config": {"host_cache": -1}}, "async_ckpt_config is not supported; drop it and use --checkpoint"),
    ],
)  # fmt: skip
def test_message_names_key_and_remedy(tmp_path: Path, content: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        with_file(tmp_path, content)
    assert message in str(caught.value) and "\x1b" not in str(caught.value)


def test_numbers_as_json_writes_them(tmp_path: Path) -> None:
    built = build_deepspeed_config(with_file(tmp_path, '{"zero_optimization": {"reduce_bucket_size": 5e7}}'))
    found = built["zero_optimization"]["reduce_bucket_size"]
    assert (found, type(found)) == (50_000_000, int)


def test_sections_that_are_off_do_not_reach_deepspeed(tmp_path: Path) -> None:
    """It refuses some of them whatever they say."""
    content = {
        "amp": False, "nebula": {"enabled": False}, "curriculum_learning": {"enabled": False, "min_difficulty": 8},
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "none"}, "cpu_offload": False},
        "optimizer": None, "none_ckpt": False, "flops_profiler": None, "sequence_parallel_size": 1,
        "zero_force_ds_cpu_optimizer": True, "tensor_parallel": None, "elasticity": {"enabled": False},
    }  # fmt: skip
    assert build_deepspeed_config(with_file(tmp_path, content)) == build_deepspeed_config(configure(BATCH))


def test_activation_checkpointing_sets_the_flags(tmp_path: Path) -> None:
    flags = BATCH + "--checkpoint-activations --deepspeed-activation-checkpointing "
    content = {"activation_checkpointing": {"profile": True, "number_checkpoints": 4, "cpu_checkpointing": False}}
    assert with_file(tmp_path, content, flags).parallel.profile_backward
    with pytest.raises(ConfigError, match="number_checkpoints is 3, but --num-layers makes it 4"):
        with_file(tmp_path, {"activation_checkpointing": {"number_checkpoints": 3}}, flags)
    with pytest.raises(ConfigError, match="profile is False, but --profile-backward makes it True"):
        with_file(tmp_path, {"activation_checkpointing": {"profile": False}}, flags + "--profile-backward")
