"""The prediction of step times: what is counted against formulas by hand, and arithmetic of schedule and device.

No time is measured: whether the prediction is right, the GPU tier shows.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron.model.flops import flops_of_batch
from tests.dist.harness import Zygote
from tests.gpu.predictions import PREDICTIONS
from tools.ckpt_plan.cli import main
from tools.ckpt_plan.presets import Planned, config_for, config_from_flags
from tools.ckpt_plan.recomputation import MODES, mode_of, with_mode
from tools.ckpt_plan.step_time import devices
from tools.ckpt_plan.step_time.fusion import fused
from tools.ckpt_plan.step_time.layers import BLOCK, EMBEDDING, HEAD, NORM, LayerPasses, block_of, count_layers
from tools.ckpt_plan.step_time.optimizer import each_micro_batch_bytes, each_step_bytes
from tools.ckpt_plan.step_time.passes import ALL_TO_ALL, CudaKernels, Pass, PassRecorder
from tools.ckpt_plan.step_time.step import PARTS, StepTime, step_time
from tools.ckpt_plan.step_time.timing import collective_seconds, pass_seconds, seconds_of

pytestmark = pytest.mark.usefixtures("own_environment")

BATCH, SEQ, HIDDEN, HEADS, KV_HEADS, FFN, LAYERS, VOCABULARY = 2, 32, 64, 4, 2, 96, 4, 256
WIDTH = HIDDEN // HEADS
TOKENS = BATCH * SEQ
FLAGS = (
    f"--num-layers {LAYERS} --hidden-size {HIDDEN} --num-attention-heads {HEADS} --num-key-value-heads {KV_HEADS} "
    f"--ffn-hidden-size {FFN} --seq-length {SEQ} --max-position-embeddings {SEQ} --micro-batch-size {BATCH} "
    "--train-iters 2 --lr 1e-3 --data-path x --tokenizer-type NullTokenizer --vocab-size 255 --attention-dropout 0 "
    "--hidden-dropout 0 --no-query-key-layer-scaling --use-rotary-position-embeddings --swiglu --normalization rmsnorm "
    "--untie-embeddings-and-output-weights --disable-bias-linear --bf16"
)
# A device on which each operation takes no time but that of its operations and bytes.
PLAIN = replace(devices.device_facts("h100"), product_us=0, kernel_us=0, collective_us=0, launch_us=0)


def planned_of(flags: str = "", dp: int = 1) -> Planned:
    return config_from_flags(f"{FLAGS} {flags}".split(), dp, VOCABULARY)


def layers_of(planned: Planned) -> dict[str, LayerPasses]:
    config, layout, (_, padded) = planned
    return count_layers(config.model, padded, layout.tp, config.parallel.splits_sequence, BATCH, layout.ep)


def of_kind(passes: tuple[Pass, ...], kind: str) -> list[Pass]:
    return [each for each in passes if each.kind == kind]


def flops(passes: tuple[Pass, ...], kind: str) -> int:
    return sum(each.flops for each in of_kind(passes, kind))


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("split", ["", "--sequence-parallel"])
def test_a_layer_has_the_products_of_the_formula(tp: int, split: str) -> None:
    planned = planned_of(f"--tensor-model-parallel-size {tp} {split if tp > 1 else ''}")
    block = layers_of(planned)[BLOCK]
    weights = HIDDEN * (HEADS + 2 * KV_HEADS) * WIDTH + HIDDEN * HEADS * WIDTH + 3 * HIDDEN * FFN
    assert flops(block.forward, "product") == 2 * TOKENS * weights // tp
    assert flops(block.backward, "product") == 2 * 2 * TOKENS * weights // tp
    scores = BATCH * HEADS * SEQ * SEQ * WIDTH // 2  # the half below the diagonal
    assert flops(block.forward, "attention") == 2 * 2 * scores // tp
    assert flops(block.backward, "attention") == 5 * 2 * scores // tp


EXPERTS = 4  # of every second layer


@pytest.mark.parametrize("ep", [1, 2])
@pytest.mark.parametrize("tp", [1, 2])
def test_experts_compute_their_slots_and_exchange_them(tp: int, ep: int) -> None:
    """Twice as many slots as tokens, used or not; each rank of a tensor-parallel group exchanges all of them."""
    flags = f"--tensor-model-parallel-size {tp} --moe-expert-parallel-size {ep}"
    flags += f" --num-experts {EXPERTS} --moe-train-capacity-factor 2"
    layers = layers_of(planned_of(flags, ep))
    block = layers[block_of(EXPERTS)]
    slots = 2 * TOKENS
    attention = HIDDEN * (HEADS + 2 * KV_HEADS) * WIDTH + HIDDEN * HEADS * WIDTH
    products = 2 * (TOKENS * attention + slots * 3 * HIDDEN * FFN) // tp + 2 * TOKENS * HIDDEN * EXPERTS  # the gate
    assert flops(block.forward, "product") == products and flops(block.backward, "product") == 2 * products
    exchanged = [(each.name, each.payload) for each in of_kind(block.forward, "collective") if each.name == ALL_TO_ALL]
    assert exchanged == [(ALL_TO_ALL, 2 * slots * HIDDEN)] * (2 if ep > 1 else 0)
    assert len(of_kind(block.backward, "collective")) >= len(exchanged)
    dense = layers_of(planned_of(f"--tensor-model-parallel-size {tp}"))
    assert flops(layers[BLOCK].forward, "product") == flops(dense[BLOCK].forward, "product")


def test_a_step_with_divided_experts() -> None:
    """Exchanges over the slowest link of those who exchange; gradients of experts are reduced over fewer ranks."""
    of_experts = f"--num-experts {EXPERTS} --moe-train-capacity-factor 2"
    device = replace(PLAIN, network_GBps=PLAIN.link_GBps / 4, network_share=PLAIN.link_share)
    within, across = (
        step_time(planned_of(f"{of_experts} --moe-expert-parallel-size 2", 4), device, ranks) for ranks in (2, 1)
    )
    slots = 2 * 2 * TOKENS * HIDDEN  # bytes
    exchanges = LAYERS // 2 * 4 * slots / 2 / (device.link_GBps * 1e9 * device.link_share)
    assert within.parts["expert_parallel"] == pytest.approx(exchanges)
    assert across.parts["expert_parallel"] == pytest.approx(4 * exchanges)
    whole = step_time(planned_of(of_experts, 4), device, 2)
    assert whole.parts["expert_parallel"] == 0 and whole.parameters == within.parameters
    assert sum(each.flops for each in within.passes) == sum(each.flops for each in whole.passes)
    # DP 4 over the network: every expert by 4 ranks, 2 x 3/4 and 3/4 of its 6 bytes; or half of them, by 2 ranks.
    expert = LAYERS // 2 * EXPERTS * 3 * HIDDEN * FFN
    spared = (expert * 3 / 4 - expert / 2 * 1 / 2) * (2 * 4 + 2) / (device.network_GBps * 1e9 * device.network_share)
    assert whole.parts["data_parallel"] - within.parts["data_parallel"] == pytest.approx(spared)
    planned = planned_of(f"{of_experts} --moe-expert-parallel-size 2", 4)
    near, far = (step_time(planned, device, ranks, recomputation="full").parts["recomputation"] for ranks in (2, 1))
    assert far - near == pytest.approx(3 * exchanges / 2)  # the forward pass again, over a link of a fourth


def test_all_products_are_those_that_the_training_log_counts() -> None:
    planned = planned_of()
    layers = layers_of(planned)
    found = 0
    for name, count in ((EMBEDDING, 1), (BLOCK, LAYERS), (NORM, 1), (HEAD, 1)):
        both = (*layers[name].forward, *layers[name].backward)
        found += count * flops(both, "product")
        # The log counts all scores (twice as many) and thrice the forward pass, without what the kernel computes again.
        found += count * 2 * 3 * flops(layers[name].forward, "attention")
    assert found == flops_of_batch(planned[0], planned[2][1], BATCH)


def test_a_product_moves_its_three_matrices() -> None:
    block = layers_of(planned_of())[BLOCK]
    first = of_kind(block.forward, "product")[0]
    rows, inner, columns = first.shape
    assert first.shape == (TOKENS, HIDDEN, (HEADS + 2 * KV_HEADS) * WIDTH)
    assert first.num_bytes == 2 * (rows * inner + inner * columns + rows * columns)


def test_the_embedding_moves_only_the_rows_of_its_tokens() -> None:
    embedding = layers_of(planned_of())[EMBEDDING]
    [read] = embedding.forward
    assert read.num_bytes == TOKENS * 8 + 2 * TOKENS * HIDDEN * 2  # ids, rows read, rows written


def recorded(call: Any) -> list[Pass]:
    with PassRecorder() as recorder, CudaKernels(recorder):
        call()
    return recorder.passes


def test_bytes_of_single_operations() -> None:
    x = torch.empty(8, 16, device="meta")
    index = torch.zeros(8, 1, dtype=torch.int64, device="meta")
    cases = [
        (lambda: x + x, 3 * 512),
        (lambda: x.add_(x[:, :1].expand(8, 16)), 2 * 512 + 32),  # the expanded column is read once
        (lambda: x.copy_(x.new_empty(8, 16)), 2 * 512),  # not read before it is written
        (lambda: x.zero_(), 512),
        (lambda: torch.mul(x, 2, out=x.new_empty(8, 16)), 2 * 512),
        (lambda: x.to(torch.bfloat16), 512 + 256),
        (lambda: x.gather(1, index), 64 + 32 + 32),
        (lambda: x.scatter_add_(1, index, x.new_empty(8, 1)), 64 + 32 + 2 * 32),
        (lambda: x.sum(), 512 + 4),
    ]
    for call, expected in cases:
        assert sum(each.num_bytes for each in recorded(call)) == expected
    for view in (lambda: x.view(16, 8), lambda: x.transpose(0, 1), lambda: x[2:], lambda: torch.empty_like(x)):
        assert recorded(view) == []


def test_kernels_that_only_cuda_has() -> None:
    query = torch.empty(BATCH, SEQ, HEADS, WIDTH, dtype=torch.bfloat16, device="meta").transpose(1, 2)
    key = torch.empty(BATCH, SEQ, KV_HEADS, WIDTH, dtype=torch.bfloat16, device="meta").transpose(1, 2)
    [attention] = recorded(lambda: F.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True))
    tensors = 2 * TOKENS * WIDTH * (2 * HEADS + 2 * KV_HEADS)
    assert (attention.name, attention.num_bytes) == ("attention", tensors + 4 * TOKENS * HEADS)
    x, weight = torch.empty(TOKENS, HIDDEN, device="meta"), torch.empty(HIDDEN, device="meta")
    [norm] = recorded(lambda: F.rms_norm(x, (HIDDEN,), weight))
    assert norm.num_bytes == 2 * 4 * TOKENS * HIDDEN + 4 * HIDDEN + 4 * TOKENS
    with pytest.raises(NotImplementedError, match="mask"):
        recorded(lambda: F.scaled_dot_product_attention(query, query, query, attn_mask=x))


def test_collectives_are_those_of_the_layer() -> None:
    whole = 2 * TOKENS * HIDDEN
    plain = layers_of(planned_of("--tensor-model-parallel-size 2"))[BLOCK]
    found = [(each.name, each.payload) for each in of_kind((*plain.forward, *plain.backward), "collective")]
    assert found == [("all_reduce", whole)] * 4
    split = layers_of(planned_of("--tensor-model-parallel-size 2 --sequence-parallel"))[BLOCK]
    found = [(each.name, each.payload) for each in of_kind(split.forward, "collective")]
    assert found == [("all_gather", whole), ("reduce_scatter", whole)] * 2


def test_fused_passes_move_what_enters_and_what_is_needed_after_them() -> None:
    def memory(name: str, reads: tuple[int, ...], writes: tuple[int, ...]) -> Pass:
        return Pass(name, "memory", tuple((each, 10) for each in reads), tuple((each, 10) for each in writes), False)

    product = Pass("mm", "product", ((3, 10),), ((4, 10),), False)
    forward = (memory("a", (0,), (1,)), memory("b", (1, 5), (2,)), memory("c", (2,), (3,)), product)
    layer = LayerPasses(forward, (memory("d", (4, 2), (6,)), memory("e", (6,), (7,))), frozenset({7}))
    found = fused(layer)
    first, second = found.forward
    assert (first.reads, first.writes) == (((0, 10), (5, 10)), ((2, 10), (3, 10)))  # 2 is read in the backward pass
    assert second is product
    [backward] = found.backward
    assert (backward.reads, backward.writes) == (((4, 10), (2, 10)), ((7, 10),))


def test_a_layer_keeps_its_products_when_it_is_fused() -> None:
    block = layers_of(planned_of())[BLOCK]
    compiled = fused(block)
    for before, after in ((block.forward, compiled.forward), (block.backward, compiled.backward)):
        assert of_kind(after, "product") == of_kind(before, "product")
        moved = [sum(each.num_bytes for each in of_kind(passes, "memory")) for passes in (before, after)]
        assert 0 < moved[1] < moved[0]


@pytest.mark.slow
def test_the_optimizer_moves_what_deepspeed_moves(zygote: Zygote, tmp_path: Path) -> None:
    run = zygote.run([], 1, tmp_path, script=str(Path(__file__).with_name("count_optimizer_passes.py")))
    assert run.ok, run.output
    counted = json.loads(run.log().splitlines()[-1])
    config, _, _ = planned_of()
    many = 10**9
    for name, immediate in (("immediate", True), ("kept", False)):
        found = counted[name]
        assert found["micro_batch"] == pytest.approx(each_micro_batch_bytes(immediate), rel=0.01)
        expected = each_step_bytes(config.optimizer, many, 1) / many
        assert found["reduction"] + found["step"] == pytest.approx(expected, rel=0.01)


def test_seconds_of_a_pass() -> None:
    product = Pass("mm", "product", ((0, 10**9),), ((1, 10**9),), False, flops=10**13)
    of_peak = 989.4e12 * PLAIN.product_share
    assert pass_seconds(product, PLAIN, 1) == pytest.approx(1e13 / of_peak)
    narrow = replace(product, flops=10)  # its bytes take longer
    assert pass_seconds(narrow, PLAIN, 1) == pytest.approx(2e9 / (3350e9 * PLAIN.bandwidth_share))
    slow = replace(PLAIN, product_us=7)
    assert pass_seconds(product, slow, 1) == pytest.approx(1e13 / of_peak + 7e-6)
    assert collective_seconds("all_reduce", 8 * 10**9, 8, 100.0, PLAIN) == pytest.approx(0.14)
    assert collective_seconds("all_gather", 8 * 10**9, 8, 100.0, PLAIN) == pytest.approx(0.07)
    assert collective_seconds("all_gather", 8 * 10**9, 1, 100.0, PLAIN) == 0


def test_a_collective_is_hidden_up_to_the_first_pass_that_waits_for_it() -> None:
    device = replace(PLAIN, link_GBps=1.0, link_share=1.0)
    reduce = Pass("all_reduce", "collective", ((0, 0),), ((0, 0),), True, payload=10**9)  # 1 s of two ranks
    memory = Pass("mul", "memory", ((1, 0),), ((2, round(0.4 * 3350e9 * device.bandwidth_share)),), True)  # 0.4 s
    waits = replace(memory, reads=((0, 0),))
    assert seconds_of([reduce, memory, waits, memory], device, 2).collectives == pytest.approx(1.0)
    beside = replace(reduce, beside=True)
    assert seconds_of([beside, memory, waits, memory], device, 2).collectives == pytest.approx(0.6)
    # A pass hides one collective at a time.
    other = replace(beside, reads=((9, 0),), writes=((9, 0),))
    of_both = replace(memory, reads=((0, 0), (9, 0)))
    assert seconds_of([beside, other, memory, of_both], device, 2).collectives == pytest.approx(1.6)


def test_the_pipeline_waits_for_its_other_stages_once() -> None:
    flags = "--pipeline-model-parallel-size 2 --global-batch-size 16"
    planned = planned_of(flags)
    step = step_time(planned, PLAIN, 8)
    alone = step_time(planned_of("--global-batch-size 16"), PLAIN, 8)
    assert step.micro_batches == 8
    busy = ("matrix_products", "attention", "memory_passes")
    first_and_last = sum(alone.parts[name] for name in busy) / 8  # of one micro batch on both stages
    slowest = sum(step.parts[name] for name in (*busy, "gradient_accumulation", "pipeline_sends")) / 8
    assert first_and_last / 2 < slowest < first_and_last
    more = step_time(planned_of(flags.replace("16", "32")), PLAIN, 8)
    assert more.parts["pipeline_bubble"] == pytest.approx(step.parts["pipeline_bubble"])
    assert more.parts["matrix_products"] == pytest.approx(2 * step.parts["matrix_products"])


@pytest.mark.parametrize("compiled", [False, True])
def test_recomputation_costs_another_forward_pass(compiled: bool) -> None:
    planned = planned_of()
    steps = {mode: step_time(planned, PLAIN, 8, recomputation=mode, compiled=compiled) for mode in MODES}
    assert [step.recomputation for step in steps.values()] == list(MODES)
    forward = layers_of(planned)[BLOCK]
    again = seconds_of((fused(forward) if compiled else forward).forward, PLAIN, 1).device
    assert steps["full"].parts["recomputation"] == pytest.approx(LAYERS * again)
    assert steps["none"].seconds < steps["selective"].seconds < steps["full"].seconds
    assert steps["full"].device_bytes < steps["selective"].device_bytes < steps["none"].device_bytes


def test_selective_recomputation_computes_norms_and_activation_again() -> None:
    config, layout, vocabulary = planned_of()
    none, selective = (
        [each.name for each in layers_of((with_mode(config, mode), layout, vocabulary))[BLOCK].backward]
        for mode in ("none", "selective")
    )
    again = Counter(selective) - Counter(none)
    assert again == Counter(rms_norm=2, silu=1, mul_=1)
    assert not Counter(none) - Counter(selective)


def test_replicas_reduce_over_the_slowest_link() -> None:
    def data_parallel(dp: int, ranks_per_host: int) -> float:
        return step_time(planned_of(dp=dp), PLAIN, ranks_per_host).parts["data_parallel"]

    assert data_parallel(1, 8) == 0
    within, across = data_parallel(4, 4), data_parallel(4, 2)
    assert across / within == pytest.approx(
        PLAIN.link_GBps * PLAIN.link_share / (PLAIN.network_GBps * PLAIN.network_share)
    )


def test_launches_show_where_the_processor_is_slower_than_the_device() -> None:
    step = step_time(planned_of(), replace(PLAIN, launch_us=1000), 8)
    assert step.parts["launches"] > 0.9 * step.seconds
    assert step_time(planned_of(), PLAIN, 8).parts["launches"] == 0


def test_another_recomputation_is_a_valid_configuration() -> None:
    config, _, _ = config_for("1b", 1, 1)
    for mode in MODES:
        assert mode_of(with_mode(config, mode).model) == mode
    split = planned_of(
        "--tensor-model-parallel-size 2 --checkpoint-activations --checkpoint-num-layers 2 "
        "--deepspeed-activation-checkpointing --partition-activations"
    )[0]
    assert mode_of(with_mode(split, "none").model) == "none"
    assert with_mode(split, "full") is split


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(arguments)
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_the_command_prints_text_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    command = ("--step-time", "h100")
    status, out, err = answer(capsys, *command, "--format", "json", "--", *FLAGS.split())
    assert status == 0, err
    found = json.loads(out)
    assert list(found["by_part_s"]) == list(PARTS)
    assert found["step_s"] == pytest.approx(sum(found["by_part_s"].values()))
    assert found["mfu"] == pytest.approx(found["tflops"] / 989.4)
    assert found["tokens_per_s"] == pytest.approx(TOKENS / found["step_s"])
    assert [(each["recomputation"], each["compiled"]) for each in found["settings"]] == [
        (mode, compiled) for compiled in (False, True) for mode in MODES
    ]
    assert found["settings"][0]["step_s"] == found["step_s"]
    status, out, err = answer(capsys, *command, "--", *FLAGS.split())
    assert status == 0, err
    assert f"a step takes {found['step_s'] * 1e3:.1f} ms: MFU {found['mfu']:.1%}" in out
    assert "none *" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "--step-time h900",
            "--step-time h900: no such device; there are: h100, h200, a100; give the facts of another",
        ),
        ("--step-time h100 --engine lazy", "--engine: not printed with --step-time; drop one of the two"),
        ("--step-time h100 --run", "--run: not printed with --step-time; drop one of the two"),
        ("--device-facts x.json", "--device-facts x.json: add --step-time DEVICE, or drop it"),
        ("--ranks-per-host 4", "--ranks-per-host 4: add --run or --host-memory or --step-time or "),
        ("--step-time mine --device-facts absent.json", "No such file"),
    ],
)
def test_what_cannot_be_predicted(capsys: pytest.CaptureFixture[str], arguments: str, message: str) -> None:
    status, _, err = answer(capsys, *arguments.split(), "--", *FLAGS.split())
    assert status == 2
    assert message in err


def test_other_types_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = answer(capsys, "--step-time", "h100", "--", *FLAGS.replace("--bf16", "--fp16").split())
    assert status == 2
    assert "--step-time: predicts bf16 only, since the peaks of devices are those of bf16; add --bf16" in err


def test_attention_with_biases_is_not_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    flags = f"{FLAGS} --position-embedding-type alibi".replace("--use-rotary-position-embeddings ", "")
    status, _, err = answer(capsys, "--step-time", "h100", "--", *flags.split())
    assert status == 2
    assert "--position-embedding-type alibi: --step-time predicts attention without a matrix of biases" in err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            "--num-experts 4 --disable-moe-token-dropping",
            "--disable-moe-token-dropping: how many tokens an expert gets is known in a training alone",
        ),
        ("--ds-sequence-parallel-size 2", "--ds-sequence-parallel-size 2: --step-time predicts no exchange of heads"),
    ],
)
def test_layers_that_are_not_predicted(capsys: pytest.CaptureFixture[str], given: str, message: str) -> None:
    status, _, err = answer(capsys, "--dp", "2", "--step-time", "h100", "--", *FLAGS.split(), *given.split())
    assert status == 2
    assert message in err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "no JSON"),
        ("[]", "must be an object with the facts of mine"),
        ('{"other": {}}', "must be an object with the facts of mine"),
        ('{"mine": {"like": "h900"}}', "mine: like 'h900': no such device; there are: h100, h200, a100"),
        ('{"mine": {"like": "h100", "speed": 1}}', "mine: 'speed' is no fact of a device; there are: peak_tflops"),
        ('{"mine": {"peak_tflops": 1}}', 'mine: memory_bytes is missing; give it, or "like": a device that has it'),
        ('{"mine": {"like": "h100", "product_share": 1.5}}', "product_share 1.5: must be a number in (0, 1]"),
        ('{"mine": {"like": "h100", "peak_tflops": 0}}', "peak_tflops 0: must be a number above 0"),
        ('{"mine": {"like": "h100", "launch_us": -1}}', "launch_us -1: must be a number at least 0"),
        ('{"mine": {"like": "h100", "peak_tflops": true}}', "peak_tflops True: must be a number above 0"),
        (
            '{"mine": {"like": "h100", "compared_ranks": 8}}',
            "mine: compared_ranks is given without compared_parameters; give both",
        ),
        (
            '{"mine": {"like": "h100", "compared_parameters": 1e9}}',
            "mine: compared_parameters is given without compared_ranks; give both",
        ),
    ],
)
def test_files_of_facts_that_are_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "facts.json"
    path.write_text(content)
    with pytest.raises(devices.ConfigError, match=f"^--device-facts {path}") as caught:
        devices.device_facts("mine", path)
    assert message in str(caught.value)


def test_a_file_gives_the_facts_of_a_device(tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    path.write_text('{"mine": {"like": "h200", "product_share": 0.5}}')
    found = devices.device_facts("mine", path)
    assert found == replace(devices.device_facts("h200"), name="mine", product_share=0.5)


def test_predictions_hold_together() -> None:
    """Of each preset: parts add up, MFU is below the shares of the peak that are assumed."""
    step: StepTime = step_time(config_for("1b", 1, 1), devices.device_facts("h100"), 8)
    assert step.seconds == pytest.approx(sum(step.parts.values()))
    assert all(seconds >= 0 for seconds in step.parts.values())
    assert 0.1 < step.mfu < step.device.product_share


@pytest.mark.parametrize(
    ("facts", "headline", "too_far"),
    [
        ({}, "Prediction, compared with no measured step on mine", None),
        (
            {"compared_ranks": 4, "compared_parameters": 1e12},
            "Prediction, for no more ranks and parameters than the measured steps on mine had",
            [],
        ),
        (
            {"compared_ranks": 2, "compared_parameters": 1e5},
            "Prediction, extrapolated from 2 to 4 ranks, from 0.0001 to 0.000156 billion parameters",
            [False, False],
        ),
        (
            {"compared_ranks": 4, "compared_parameters": 100},
            "Prediction, extrapolated from 1e-07 to 0.000156 billion parameters; beyond 20 times what ran",
            [True],
        ),
    ],
)
def test_the_headline_says_how_far_a_prediction_goes_beyond_measured_steps(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    facts: dict[str, float],
    headline: str,
    too_far: list[bool] | None,
) -> None:
    path = tmp_path / "facts.json"
    path.write_text(json.dumps({"mine": {"like": "h100", **facts}}))
    command = ["--step-time", "mine", "--device-facts", str(path), "--dp", "4"]
    flags = ["--", *FLAGS.split(), "--global-batch-size", str(4 * BATCH)]
    _, out, err = answer(capsys, *command, *flags)
    assert out.startswith(headline), err
    reaches = json.loads(answer(capsys, *command, "--format", "json", *flags)[1])["extrapolated"]
    assert (None if reaches is None else [reach["too_far"] for reach in reaches]) == too_far


@pytest.mark.parametrize(("part", "micro_batches"), [("step-time", 1), ("step-time-4", 4)])
def test_the_gpu_tier_compares_with_this_prediction(part: str, micro_batches: int) -> None:
    size = 4  # MICRO_BATCH of the tier
    flags = ["--micro-batch-size", str(size), "--global-batch-size", str(size * micro_batches)]
    planned = config_for("1b", 1, 1, flags=flags)
    step = step_time(planned, devices.device_facts("h100"), 8, recomputation="none")
    told = {one.what.partition(",")[0]: one.predicted for one in PREDICTIONS}
    assert told[f"`{part}`: an iteration"] == pytest.approx(step.seconds, rel=0.02)
    assert told[f"`{part}`: MFU"] == pytest.approx(100 * step.mfu, rel=0.02)
    assert told[f"`{part}`: attention's kernels"] == pytest.approx(step.parts["attention"], rel=0.02)
    assert told["`step-time`: device peak"] == pytest.approx(step.device_bytes / 1e9, rel=0.02)
