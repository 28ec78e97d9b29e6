"""Quantized models in other processes: each way to start them, to share memory, and to hand a model over."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn

import pennyweight as pw
from tests.core import processes

START = ("spawn", "forkserver", "fork")
SHARING = ("file_descriptor", "file_system")


@pytest.fixture(params=SHARING)
def sharing(request: pytest.FixtureRequest) -> Iterator[str]:
    before = mp.get_sharing_strategy()
    mp.set_sharing_strategy(request.param)
    yield request.param
    mp.set_sharing_strategy(before)


def model_of(name: str) -> tuple[nn.Module, Any]:
    model = processes.MODELS[name]()
    return model, processes.run(model).tolist()


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_arguments_of_a_process(method: str, sharing: str) -> None:
    context = mp.get_context(method)
    models = {name: model_of(name) for name in processes.MODELS}
    queue = context.SimpleQueue()
    process = context.Process(target=processes.put, args=(queue, [model for model, _ in models.values()]))
    process.start()
    outputs = [queue.get() for _ in models]
    process.join()
    assert process.exitcode == 0
    for (name, (model, expected)), output in zip(models.items(), outputs, strict=True):
        assert output == expected, name
        assert processes.run(model).tolist() == expected, name


@pytest.mark.parametrize("method", START)
def test_every_way_to_hand_a_model_over(method: str, sharing: str) -> None:
    """In one child: argument of Process, Queue, SimpleQueue, models that are gone at once, and Pool."""
    context = mp.get_context(method)
    models = {name: model_of(name) for name in ("int8", "int4", "frozen")}
    requests, answers = context.Queue(), context.SimpleQueue()
    process = context.Process(target=processes.take, args=(requests, answers))
    process.start()
    for model, expected in models.values():
        requests.put(model)
        assert answers.get() == expected
    requests.put(processes.net("int8"))  # nobody but the queue holds it
    gc.collect()
    assert answers.get() == models["int8"][1]
    requests.put(None)
    process.join()
    assert process.exitcode == 0
    with context.Pool(1) as pool:
        outputs = pool.map(processes.run, [model for model, _ in models.values()])
        assert [y.tolist() for y in outputs] == [expected for _, expected in models.values()]


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_shared_memory_is_shared(method: str) -> None:
    """What a child writes into a shared weight is what this process reads, as for float models."""
    model, _ = model_of("int8")
    model.share_memory()
    before = model[0].weight.dequantize()
    process = mp.get_context(method).Process(target=processes.double, args=(model,))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert torch.equal(model[0].weight.dequantize(), before * 2)


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_data_loader(method: str) -> None:
    model, expected = model_of("int4")
    loader = torch.utils.data.DataLoader(
        processes.Inputs(model), num_workers=1, multiprocessing_context=method, batch_size=None
    )
    assert [y.tolist() for y in loader] == [expected] * 2


def test_joblib() -> None:
    joblib = pytest.importorskip("joblib")  # with scikit-learn
    model, expected = model_of("int8")
    outputs = joblib.Parallel(n_jobs=2)(joblib.delayed(processes.run)(model) for _ in range(2))
    assert [y.tolist() for y in outputs] == [expected] * 2


def test_a_parameter_keeps_what_it_is() -> None:
    from multiprocessing.reduction import ForkingPickler

    layer = nn.Linear(64, 8)
    pw.quantize_(layer, "int8")
    for w in (layer.weight, layer.weight.detach(), layer.weight.detach().t(), layer.weight[2:5]):
        rebuild, args = ForkingPickler._extra_reducers[type(w)](w)
        again = rebuild(*args)
        assert isinstance(again, nn.Parameter) == isinstance(w, nn.Parameter)
        assert (again.requires_grad, again.axes, again.readonly) == (w.requires_grad, w.axes, w.readonly)
        assert again.data_ptr() == w.data_ptr()
        assert torch.equal(again.dequantize(), w.dequantize())
