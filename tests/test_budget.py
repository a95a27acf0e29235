"""Memory for keys and values: from what CUDA says is free, less what steps and graphs need; and refusals."""

import pytest
import torch
from tiny import tiny_model

from minillm import Engine, ModelConfig
from minillm.fast import graphs, memory
from minillm.fast.graphs import MOST_TOKENS, graph_sizes, wants_graphs
from minillm.fast.memory import CPU_BYTES, SHARE, default_kv_memory, refuse_too_much, reserved_bytes
from minillm.load import weights

GB = 10**9


class OnCuda:
    """What the budget asks of a model, of Llama-3-8B in bf16."""

    config, dtype, device = ModelConfig.preset("llama-3-8b"), torch.bfloat16, torch.device("cuda")


@pytest.fixture
def cuda(monkeypatch):
    """A device of 80 GB with 60 GB free, and 1 GB that PyTorch holds unused."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * GB, 80 * GB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 17 * GB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 16 * GB)


def test_on_cuda_the_budget_is_what_is_free_less_steps_and_graphs(cuda):
    plain = default_kv_memory(OnCuda, 2048, 256, [])
    with_graphs = default_kv_memory(OnCuda, 2048, 256, graph_sizes(256))
    assert plain == int(61 * GB * SHARE) - reserved_bytes(OnCuda.config, 2, 2048, 256, [])
    assert 0 < plain - with_graphs < GB
    assert 50 * GB < with_graphs < 55 * GB
    assert default_kv_memory(OnCuda, 8192, 256, []) < plain > default_kv_memory(OnCuda, 2048, 512, [])


def test_a_full_device_leaves_nothing_and_never_less(cuda, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 80 * GB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 16 * GB)
    assert default_kv_memory(OnCuda, 2048, 256, []) == 0


def test_elsewhere_it_is_one_gibibyte_or_what_the_largest_batch_can_use():
    assert default_kv_memory(tiny_model(), 256, 32, []) == CPU_BYTES
    engine = Engine(tiny_model(), max_batch=3, max_context=40)
    assert engine.stats().blocks_free == 3 * 3  # blocks of 16


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("can't allocate memory")])
def test_out_of_memory_names_a_budget_that_fits(error):
    refusal = r"70,000,000 bytes does not fit in memory: kv_memory=50,000,000"
    with pytest.raises(ValueError, match=refusal), refuse_too_much(70_000_000, 50_000_000):
        raise error


def test_an_engine_too_large_for_this_machine_says_so():
    with pytest.raises(ValueError, match="does not fit in memory: kv_memory=1,073,741,824, the default here, would"):
        Engine(tiny_model(), kv_memory=1 << 47, block_size=1 << 20)


@pytest.mark.parametrize(
    ("dtype", "refusal"),
    [("bf16", r"8,030,261,248 weights take 16,060,522,496 bytes in bfloat16, which cuda has 10,000,000,000 free: "
              r"a model of at most 5,000,000,000 weights would fit"),
     ("fp32", r"32,121,044,992 bytes in float32, .* a model of at most 2,500,000,000 weights")],
)
def test_a_model_too_large_for_its_device_says_what_would_fit(dtype, refusal, cuda, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (9 * GB, 80 * GB))
    with pytest.raises(ValueError, match=refusal):
        load_too_large(monkeypatch, "llama-3-8b", dtype)


def test_weights_that_fit_in_half_the_bytes_are_told_so(cuda, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (17 * GB, 80 * GB))
    with pytest.raises(ValueError, match=r"in dtype='bf16' or 'fp16' they take 16,060,522,496$"):
        load_too_large(monkeypatch, "llama-3-8b", "fp32")


def load_too_large(monkeypatch, preset: str, dtype: str) -> None:
    """Load on CUDA, which runs out of memory."""

    def runs_out(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(weights, "choose_device", torch.device)  # which would ask whether there is one
    monkeypatch.setattr(weights, "FastLlama", runs_out)
    weights.load_model(f"random:{preset}", "cuda", dtype)


def test_other_errors_are_not_taken_for_it():
    with pytest.raises(RuntimeError, match="a bug"), refuse_too_much(1, 1):
        raise RuntimeError("a bug")


# -- which graphs -------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 2, 3, 8, 9, 17, 100, 256, 5000])
def test_graph_sizes_rise_to_the_largest_step_and_waste_little(most):
    sizes = graph_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[-1] == min(most, MOST_TOKENS)
    for tokens in range(1, sizes[-1] + 1):
        size = next(size for size in sizes if size >= tokens)
        assert size - tokens < 16 and size <= 2 * tokens
    assert graph_sizes(0) == []


def test_graphs_are_off_without_cuda_and_cannot_be_insisted_on(monkeypatch):
    model = tiny_model()
    assert not wants_graphs(model, "auto") and not wants_graphs(model, False) and not wants_graphs(None, "auto")
    with pytest.raises(ValueError, match="cuda_graphs=True needs a model on CUDA"):
        Engine(model, cuda_graphs=True)
    with pytest.raises(ValueError, match="cuda_graphs='yes': choose True, False or 'auto'"):
        Engine(model, cuda_graphs="yes")
    monkeypatch.setattr(graphs, "kernels_for", lambda device: memory)  # any module stands for the kernels
    assert wants_graphs(model, "auto") and wants_graphs(model, True) and not wants_graphs(model, False)
