"""breakdown(): which part of which layer gets which time, and what is left behind.

Times are those of a clock that only the parts of the models here turn, so they are
exact.

SPDX-License-Identifier: BSD-3-Clause
"""

from __future__ import annotations

import json
import threading
import types
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from helpers import ARCH, builtin, needs_simulator, stock_sdpa
from helpers.profile_sample import png_size
from torch import nn

import flash_attn_rocm as fa
from flash_attn_rocm import FlashAttnError, _breakdown, _breakdown_report, _shim
from flash_attn_rocm._breakdown import breakdown
from flash_attn_rocm._breakdown_report import quantile

WIDTH, HEADS, LENGTH = 16, 2, 5


class Clock:
    """Seconds that pass when a test says so; one for each thread."""

    def __init__(self):
        self.local = threading.local()

    def spend(self, seconds):
        self.local.now = self.now() + seconds

    def now(self):
        return getattr(self.local, "now", 0.0)


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(_breakdown, "_mark", lambda device: made.now())
    return made


class Takes(nn.Linear):
    """A projection that takes `seconds`."""

    def __init__(self, clock, seconds, outputs=WIDTH):
        super().__init__(WIDTH, outputs)
        self.clock, self.seconds = clock, seconds

    def forward(self, x):
        self.clock.spend(self.seconds)
        return super().forward(x)


class Attention(nn.Module):
    """Attention with projections of any name; scores take no time of their own.

    Between the projections and SDPA pass 8 seconds, at the end another 16.
    """

    def __init__(self, clock, inputs, output, scale=1):
        super().__init__()
        self.clock, self.inputs, self.output = clock, inputs, output
        outputs = 3 * WIDTH // len(inputs)
        for place, name in enumerate(inputs):
            setattr(self, name, Takes(clock, scale * (place + 1), outputs))
        setattr(self, output, Takes(clock, scale * 10))

    def forward(self, x):
        projected = [getattr(self, name)(x) for name in self.inputs]
        q, k, v = torch.cat(projected, -1).chunk(3, -1)
        self.clock.spend(8)
        out = self.attend(
            *(t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, v))
        )
        out = getattr(self, self.output)(out.transpose(1, 2).flatten(2))
        self.clock.spend(16)
        return out

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)


def model_of(*layers):
    return nn.Sequential(*layers)


def split(clock, scale=1):
    return Attention(clock, ("q_proj", "k_proj", "v_proj"), "o_proj", scale)


def x(batch=2):
    return torch.randn(batch, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))


def parts(report, layer=0):
    found = report.to_dict()["layers"][layer]["parts"]
    return {part["part"]: part["seconds"] for part in found}


# ---- what gets which time ----------------------------------------------------


@pytest.mark.parametrize(
    "inputs, output",
    [
        (("q_proj", "k_proj", "v_proj"), "o_proj"),
        (("query", "key", "value"), "dense"),
        (("to_q", "to_k", "to_v"), "to_out"),
        (("q", "k", "v"), "o"),
    ],
)
def test_three_projections_are_told_apart(clock, inputs, output):
    model = model_of(Attention(clock, inputs, output))
    with breakdown(model) as report:
        model(x())
    expected = dict(q=1, k=2, v=3, attention=0, output=10, other=24, whole=40)
    assert parts(report) == expected


@pytest.mark.parametrize(
    "name, output",
    [
        ("qkv", "out_proj"),
        ("c_attn", "c_proj"),
        ("query_key_value", "dense"),
        ("qkv", "out"),
    ],
)
def test_one_projection_for_all_three_is_called_qkv(clock, name, output):
    model = model_of(Attention(clock, (name,), output))
    with breakdown(model) as report:
        model(x())
    assert parts(report) == dict(qkv=1, attention=0, output=10, other=24, whole=35)


def test_attention_is_the_time_of_sdpa_alone(clock, monkeypatch):
    def slow(*args, **kwargs):
        clock.spend(5)
        return stock_sdpa(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", slow)
    model = model_of(split(clock))
    with breakdown(model) as report:
        model(x())
    assert parts(report)["attention"] == 5
    assert F.scaled_dot_product_attention is slow, "another library's stays its own"


class ByHand(Attention):
    """Attention that does not call SDPA, and takes 7 seconds for it."""

    def attend(self, q, k, v):
        self.clock.spend(7)
        return (q @ k.mT).softmax(-1) @ v


def test_without_sdpa_attention_is_what_lies_between_the_projections(clock):
    model = model_of(ByHand(clock, ("qkv",), "out"))
    with breakdown(model) as report:
        model(x())
    assert parts(report)["attention"] == 8 + 7
    assert report.to_dict()["layers"][0]["attention"] == "between projections"
    assert "as SDPA was not called: 0." in report.table()


def test_layers_have_their_names_and_times_of_their_own(clock):
    model = nn.ModuleDict({"a": split(clock), "b": nn.Sequential(split(clock, 2))})
    with breakdown(model) as report:
        model["a"](x())
        model["b"](x())
        model["b"](x())
    layers = report.to_dict()["layers"]
    assert [layer["layer"] for layer in layers] == ["a", "b.0"]
    assert [layer["calls"] for layer in layers] == [1, 2]
    assert parts(report, 0)["output"] == 10 and parts(report, 1)["output"] == 40


def test_a_model_that_is_a_layer_itself_has_its_class_for_a_name(clock):
    with breakdown(split(clock)) as report:
        pass
    assert report.to_dict()["layers"][0]["layer"] == "Attention"


def test_what_is_outside_of_the_block_or_of_a_layers_forward_is_not_counted(clock):
    model = model_of(split(clock))
    model(x())
    with breakdown(model) as report:
        model[0].q_proj(x())
        q = torch.ones(1, 1, 2, 8)
        F.scaled_dot_product_attention(q, q, q)
        model(x())
    model(x())
    assert report.to_dict()["layers"][0]["calls"] == 1 and parts(report)["q"] == 1


class Cached(Attention):
    """Cross-attention whose keys and values are computed once."""

    cache = None

    def forward(self, x):
        q = self.q_proj(x)
        if self.cache is None:
            self.cache = self.k_proj(x), self.v_proj(x)
        out = self.attend(*(t.unsqueeze(1) for t in (q, *self.cache)))
        return self.o_proj(out.squeeze(1))


def test_a_part_that_not_every_forward_has_is_counted_as_often_as_it_ran(clock):
    model = Cached(clock, ("q_proj", "k_proj", "v_proj"), "o_proj")
    with breakdown(model) as report:
        for _ in range(3):
            model(x())
    calls = {p["part"]: p["calls"] for p in report.to_dict()["layers"][0]["parts"]}
    assert calls == dict(whole=3, q=3, k=1, v=1, attention=3, output=3)


def test_a_forward_that_fails_is_not_counted_and_its_error_passes(clock):
    model = model_of(split(clock))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        with breakdown(model) as report:
            model(x())
            model[0](torch.ones(1, 2, WIDTH + 1))
    assert report.to_dict()["layers"][0]["calls"] == 1


def test_a_forward_after_one_that_failed_is_counted_right(clock):
    model = model_of(split(clock), split(clock))
    fail = model[1].v_proj.register_forward_hook(lambda *_: 1 / 0)
    with breakdown(model) as report:
        with pytest.raises(ZeroDivisionError):
            model(x())
        fail.remove()
        model(x())
    assert [layer["calls"] for layer in report.to_dict()["layers"]] == [2, 1]
    assert parts(report, 1) == {**parts(report, 0), **dict(q=1, k=2, v=3, whole=40)} | {
        "attention": 0, "output": 10, "other": 24
    }  # fmt: skip


def test_forwards_that_failed_do_not_pile_up(clock):
    model = model_of(split(clock))
    block = breakdown(model)
    with block:
        for _ in range(5):
            with pytest.raises(RuntimeError):
                model(torch.ones(1, 2, WIDTH + 1))
        assert len(block._stack()) == 1
        model(x())
        assert block._stack() == []


def test_threads_do_not_mix(clock):
    model = model_of(split(clock))
    barrier = threading.Barrier(4)

    def run():
        for _ in range(20):
            barrier.wait(10)
            model(x())

    with breakdown(model) as report:
        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    (layer,) = report.to_dict()["layers"]
    assert layer["calls"] == 80
    for part in layer["parts"]:
        assert part["p50_s"] == part["p99_s"] == part["seconds"] / 80


# ---- torch's own layers ------------------------------------------------------


def mha(**options):
    torch.manual_seed(0)
    return nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **options)


def names(report):
    return [p["part"] for p in report.to_dict()["layers"][0]["parts"]]


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize(
    "which, expected",
    [("xxx", ["qkv"]), ("xyy", ["q", "kv"]), ("xyz", ["q", "k", "v"])],
)
def test_the_packed_projection_is_told_apart(which, expected, need_weights):
    model, tensors = mha(), {name: x() for name in "xyz"}
    with breakdown(model) as report:
        model(*(tensors[name] for name in which), need_weights=need_weights)
    assert names(report) == ["whole", *expected, "attention", "output", "other"]
    how = "between projections" if need_weights else "sdpa"
    assert report.to_dict()["layers"][0]["attention"] == how
    assert all(part["seconds"] >= 0 for part in report.to_dict()["offenders"])


def test_a_packed_projection_inside_of_a_larger_tensor_is_told_apart():
    """As those have it that shard or flatten parameters."""
    model = mha()
    packed = model.in_proj_weight.detach()
    flat = torch.cat([torch.zeros(WIDTH, WIDTH), packed])
    model.in_proj_weight = nn.Parameter(flat[WIDTH:])
    with breakdown(model) as report:
        model(x(), y := x(), y, need_weights=False)
    assert names(report) == ["whole", "q", "kv", "attention", "output", "other"]


def test_separate_projections_are_told_apart():
    model = mha(kdim=3, vdim=4)
    with breakdown(model) as report:
        model(x(), x()[..., :3], x()[..., :4])
    assert names(report) == ["whole", "q", "k", "v", "attention", "output", "other"]


def test_each_part_of_torchs_layer_gets_the_time_of_its_own_product(clock, monkeypatch):
    real = F.linear

    def linear(x, weight, bias=None):
        clock.spend(weight.shape[0])
        return real(x, weight, bias)

    monkeypatch.setattr(F, "linear", linear)
    model = mha()
    with breakdown(model) as report:
        model(x(), y := x(), y, need_weights=False)
    expected = dict(q=WIDTH, kv=2 * WIDTH, attention=0, output=WIDTH, other=0)
    assert parts(report) == {**expected, "whole": 4 * WIDTH}


def encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


@pytest.mark.parametrize("fast", [True, False])
def test_an_encoder_in_inference_is_timed_without_the_fast_path(fast):
    model = encoder().eval()
    torch.backends.mha.set_fastpath_enabled(fast)
    try:
        with torch.no_grad(), breakdown(model) as report:
            model(x())
        assert torch.backends.mha.get_fastpath_enabled() is fast
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    assert names(report) == ["whole", "qkv", "attention", "output", "other"]
    layers = report.to_dict()["layers"]
    assert [layer["layer"] for layer in layers] == [
        "layers.0.self_attn",
        "layers.1.self_attn",
    ]
    assert all(layer["fast_path"] is fast for layer in layers)
    assert ("inference fast path" in report.table()) is fast


def test_training_gives_the_same_bits_inside_and_outside():
    def step(model):
        out = model(x())
        out.square().sum().backward()
        return [out, *(p.grad for p in model.parameters())]

    expected = step(encoder())
    model = encoder()
    with breakdown(model):
        found = step(model)
    assert all(torch.equal(a, b) for a, b in zip(expected, found))


# ---- who answered ------------------------------------------------------------


def answered(report):
    return report.to_dict()["layers"][0]["answered"]


def test_who_answered_is_stock_unless_patched(clock):
    model = model_of(split(clock))
    with breakdown(model) as report:
        model(x())
    assert answered(report) == {"stock": 1}


@needs_simulator
@pytest.mark.parametrize("outer", ["patched", "breakdown"])
def test_fused_calls_and_fallbacks_are_told_apart(clock, outer):
    model = model_of(split(clock))
    if outer == "patched":
        with fa.patched(), breakdown(model) as report:
            with fa.simulate(ARCH):
                model(x())
            model(x())
    else:
        with breakdown(model) as report, fa.patched():
            with fa.simulate(ARCH):
                model(x())
            model(x())
    assert answered(report) == {"sim": 1, "stock (device)": 1}
    assert "by who answered: sim 1, stock (device) 1." in report.table()
    assert F.scaled_dot_product_attention is builtin() and not _shim.is_patched()


def test_a_causal_bias_reaches_torchs_own_dispatch(clock):
    from torch.nn.attention.bias import causal_lower_right

    class Causal(Attention):
        def attend(self, q, k, v):
            bias = causal_lower_right(q.shape[2], k.shape[2])
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    model = model_of(Causal(clock, ("qkv",), "out"))
    expected = model(x())
    for patch, who in ((nullcontext, "stock"), (fa.patched, "stock (device)")):
        with patch(), breakdown(model) as report:
            found = model(x())
        assert torch.equal(found, expected) and answered(report) == {who: 1}


# ---- what is left behind -----------------------------------------------------


def hooks(model):
    return sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks)
        for module in model.modules()
    )


@pytest.fixture
def importer(monkeypatch):
    """A module that imported the function by name."""
    import sys

    module = types.ModuleType("importer")
    module.scaled_dot_product_attention = builtin()
    monkeypatch.setitem(sys.modules, "importer", module)
    return module


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_everything_is_as_it_was_on_every_exit(error, importer):
    model, linear = encoder().eval(), F.linear
    try:
        with breakdown(model):
            assert hooks(model) and F.linear is not linear
            assert F.scaled_dot_product_attention is not builtin()
            assert importer.scaled_dot_product_attention is not builtin()
            if error is not None:
                raise error("mine")
    except BaseException as raised:
        assert type(raised) is error
    assert hooks(model) == 0 and F.linear is linear
    assert F.scaled_dot_product_attention is builtin()
    assert importer.scaled_dot_product_attention is builtin()
    assert torch.backends.mha.get_fastpath_enabled()
    with breakdown(model):
        pass


def test_everything_is_as_it_was_when_the_block_cannot_begin(monkeypatch):
    model, linear = encoder(), F.linear

    def fail(self):
        raise MemoryError

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(_breakdown.Breakdown, "_exchange_sdpa", fail)
        with breakdown(model):
            pytest.fail("entered")
    assert hooks(model) == 0 and F.linear is linear
    with breakdown(model):
        pass


def test_hooks_of_the_user_stay():
    model = encoder()
    model.layers[0].self_attn.register_forward_hook(lambda *_: None)
    with breakdown(model):
        pass
    assert hooks(model) == 1


def test_patch_and_unpatch_inside_are_in_force_afterwards(clock, importer):
    model = model_of(split(clock))
    try:
        with breakdown(model):
            fa.patch()
        for module in (F, importer):
            ours = module.scaled_dot_product_attention
            assert ours is _shim.scaled_dot_product_attention
        with breakdown(model):
            assert F.scaled_dot_product_attention is not ours
        assert F.scaled_dot_product_attention is ours
        with breakdown(model):
            fa.unpatch()
        for module in (F, importer):
            assert module.scaled_dot_product_attention is builtin()
    finally:
        fa.unpatch()


def test_a_copy_that_outlives_the_block_still_works(clock):
    model = model_of(split(clock))
    with breakdown(model) as report:
        copy = F.scaled_dot_product_attention
    q = torch.ones(1, 1, 2, 8)
    assert torch.equal(copy(q, q, q), stock_sdpa(q, q, q))
    assert report.to_dict()["layers"][0]["calls"] == 0


def test_a_compiled_part_of_a_layer_has_no_graph_break_and_no_time_of_its_own(clock):
    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v)

    model = model_of(split(clock))
    expected = model(x())
    model[0].attend = torch.compile(attend, backend="eager", fullgraph=True)
    with breakdown(model) as report:
        assert torch.equal(model(x()), expected)
    assert report.to_dict()["layers"][0]["attention"] == "between projections"
    torch._dynamo.reset()


# ---- what is refused ---------------------------------------------------------


def test_a_block_inside_a_block_is_refused_by_name_and_the_outer_goes_on(clock):
    model, other = model_of(split(clock)), encoder()
    with breakdown(model) as report:
        with pytest.raises(FlashAttnError, match=r"^breakdown: .* one of Sequential"):
            with breakdown(other):
                pytest.fail("entered")
        assert hooks(other) == 0
        model(x())
    assert report.to_dict()["layers"][0]["calls"] == 1


def test_a_block_of_another_thread_is_refused_too(clock):
    errors = []

    def other():
        try:
            with breakdown(encoder()):
                pass
        except FlashAttnError as error:
            errors.append(str(error))

    with breakdown(model_of(split(clock))):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert "no other block to be open" in errors[0]


def test_a_block_is_entered_once(clock):
    block = breakdown(model_of(split(clock)))
    for _ in range(2):
        with block:
            with pytest.raises(FlashAttnError, match=r"^breakdown: .* entered before"):
                block.__enter__()
        break
    with pytest.raises(FlashAttnError, match="entered before"):
        block.__enter__()


@pytest.mark.parametrize(
    "model, words",
    [
        (None, "expected a torch.nn.Module, got NoneType"),
        (torch.ones(1), "expected a torch.nn.Module, got Tensor"),
        (nn.Linear(2, 2), "expected attention layers .*, found none in Linear"),
    ],
)
def test_what_has_no_attention_layer_is_refused_by_name(model, words):
    with pytest.raises(FlashAttnError, match=rf"^model: {words}"):
        with breakdown(model):
            pass
    assert F.scaled_dot_product_attention is builtin()


def test_a_compiled_model_is_refused():
    whole, part = torch.compile(encoder()), encoder()
    part.layers[1].compile()
    for model in (whole, part):
        with pytest.raises(FlashAttnError, match=r"^model: .* not compiled"):
            breakdown(model)


# ---- events of a GPU ---------------------------------------------------------


class Event:
    """torch.cuda.Event, of a device that is done when the test says so."""

    done = False
    waited = 0

    def __init__(self, seconds):
        self.seconds = seconds

    def query(self):
        return Event.done

    def synchronize(self):
        Event.waited += 1

    def elapsed_time(self, end):
        return 1e3 * (end.seconds - self.seconds)


@pytest.fixture
def events(clock, monkeypatch):
    monkeypatch.setattr(_breakdown, "_mark", lambda device: Event(clock.now()))
    monkeypatch.setattr(Event, "done", False)
    monkeypatch.setattr(Event, "waited", 0)
    return clock


def test_nothing_waits_for_the_device_before_the_end(events):
    model = model_of(split(events))
    with breakdown(model) as report:
        for _ in range(3):
            model(x())
        assert Event.waited == 0
    assert Event.waited > 0 and report.to_dict()["clocks"] == ["events"]
    assert parts(report)["output"] == pytest.approx(30)


def test_an_error_passes_without_waiting_for_the_device(events):
    model = model_of(split(events))
    with pytest.raises(ZeroDivisionError), breakdown(model):
        model(x())
        raise ZeroDivisionError
    assert Event.waited == 0


def test_events_that_are_over_do_not_pile_up(events, monkeypatch):
    monkeypatch.setattr(_breakdown_report, "_WAITING", 4)
    model = model_of(split(events))
    with breakdown(model) as report:
        for _ in range(10):
            model(x())
        assert len(report._waiting) == 10
        Event.done = True
        model(x())
        assert len(report._waiting) == 0
    assert report.to_dict()["layers"][0]["calls"] == 11


def test_a_graph_capture_is_not_timed_and_is_told(events, monkeypatch):
    model = model_of(split(events))
    with breakdown(model) as report:
        model(x())
        monkeypatch.setattr(_breakdown, "_mark", lambda device: None)
        model(x())
    data = report.to_dict()
    assert data["captured"] == 1 and data["layers"][0]["calls"] == 1
    assert "Inside a graph capture, and not timed: 1 forwards." in report.table()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_is_timed_by_its_own_events():
    model = encoder().cuda().half().eval()
    tensor = torch.randn(8, 512, WIDTH, device="cuda", dtype=torch.half)
    with torch.no_grad(), breakdown(model) as report:
        for _ in range(300):
            model(tensor)
        assert len(report._waiting) < 2 * 300
    data = report.to_dict()
    assert data["clocks"] == ["events"] and data["layers"][0]["calls"] == 300
    found = parts(report)
    assert min(found.values()) >= 0 and found["attention"] > 0
    inner = sum(seconds for part, seconds in found.items() if part != "whole")
    assert inner == pytest.approx(found["whole"], rel=0.01)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_captured_graph_holds_no_event():
    model = encoder().cuda().half().eval()
    tensor = torch.randn(8, 32, WIDTH, device="cuda", dtype=torch.half)
    with torch.no_grad(), breakdown(model) as report:
        model(tensor)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model(tensor)
        graph.replay()
    assert report.to_dict()["captured"] == 2


# ---- the report --------------------------------------------------------------


@pytest.fixture
def report(clock):
    model = model_of(split(clock), split(clock, 3), split(clock))
    with breakdown(model) as made:
        for _ in range(3):
            model[1](model[0](x()))
    return made


@pytest.mark.parametrize(
    "samples, q, expected",
    [
        ([7.0], 0.5, 7), ([7.0], 0.99, 7), ([1, 2], 0.5, 1), ([3, 1, 2], 0.5, 2),
        (range(1, 101), 0.99, 99), (range(1, 101), 0.5, 50), (range(1, 51), 0.99, 50),
    ],
)  # fmt: skip
def test_a_quantile_is_the_sample_of_nearest_rank(samples, q, expected):
    assert quantile(samples, q) == expected


def test_quantiles_are_of_forwards(clock):
    model = model_of(split(clock))
    with breakdown(model) as report:
        for seconds in (1, 2, 30):
            model[0].o_proj.seconds = seconds
            model(x())
    (output,) = (p for p in report.to_dict()["offenders"] if p["part"] == "output")
    assert (output["p50_s"], output["p99_s"], output["seconds"]) == (2, 30, 33)


def test_offenders_are_the_parts_with_most_time_of_all_layers(report):
    data = report.to_dict()
    found = [(p["layer"], p["part"], p["seconds"]) for p in data["offenders"]]
    assert found[:3] == [("1", "output", 90), ("0", "other", 72), ("1", "other", 72)]
    shares = [p["share"] for layer in data["layers"] for p in layer["parts"][:1]]
    assert sum(shares) == pytest.approx(1)


def test_the_table_names_layers_parts_offenders_and_what_did_not_run(report):
    table = report.table()
    assert table.startswith(
        "Attention of Sequential: 2 of 3 layers ran, 6 forwards, by"
    )
    assert "1. output of 1: 26.8 %, P50 30.0 s, P99 30.0 s" in table
    assert table.endswith("Did not run: 2.\n")
    assert max(map(len, table.splitlines())) <= 88


def test_json_is_the_data_and_save_writes_it(report, tmp_path):
    assert json.loads(report.json()) == report.to_dict()
    report.save(tmp_path / "b.json")
    assert json.loads((tmp_path / "b.json").read_text()) == report.to_dict()
    with pytest.raises(FlashAttnError, match="nowhere"):
        report.save(tmp_path / "nowhere" / "b.json")


def test_the_picture_is_one(report, tmp_path):
    pytest.importorskip("matplotlib")
    report.plot(tmp_path / "b.png")
    width, height = png_size(tmp_path / "b.png")
    assert width > 1000 and height > 300
    for bad in (tmp_path / "nowhere" / "b.png", tmp_path / "b.unknown"):
        with pytest.raises(FlashAttnError, match=r"b\.(png|unknown)"):
            report.plot(bad)


def test_a_report_of_nothing_says_so_and_has_no_picture(clock, tmp_path):
    with breakdown(model_of(split(clock))) as report:
        pass
    assert "0 of 1 layers ran, 0 forwards" in report.table()
    with pytest.raises(FlashAttnError, match="plot: Attention of Sequential: 0 of 1"):
        report.plot(tmp_path / "b.png")


def test_the_report_can_be_read_inside_the_block(clock):
    model = model_of(split(clock))
    with breakdown(model) as report:
        model(x())
        assert report.to_dict()["layers"][0]["calls"] == 1
        model(x())
    assert report.to_dict()["layers"][0]["calls"] == 2
