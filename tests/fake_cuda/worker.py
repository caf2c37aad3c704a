"""Takes steps on the fake device: worker.py LIBRARY CASE..., a case is MODEL:STYLE:MODE:PRECISION[:DEPTH[:offload]].

Prints RESULT and a JSON object with the figures of each case. It has launches and waits of four parts: forwards and
backwards of an ordinary step, those of a private step, release with the optimizer's step, reading metrics. `anchors`
is the number of anchors that autograd called, and how many of them got no gradient.
"""

import json
import sys
import warnings

from tests.fake_cuda import device

B, STEPS = 4, 2
"""Rows of a micro-batch, and steps. A logical batch has two micro-batches, the second with padding.

Only the last step counts.
"""


def main(library, *cases):
    device.load(library)
    warnings.simplefilter("ignore")
    print("RESULT", json.dumps({case: steps(*case.split(":")) for case in cases}))


def steps(name, style, mode, precision, depth=None, offload=None):
    import torch
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    from dpshard.clipping import stacks
    from tests.fake_cuda import models
    from tests.fake_cuda.counting import Counts

    stacks.Tensor = FakeTensor  # uses of other subclasses are recorded one by one
    counts, dataset = Counts(), torch.utils.data.TensorDataset(*models.data(name))
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.autograd.set_multithreading_enabled(False), fake, counts, counts.on_lists():
        model = device.move(models.MODELS[name](*([] if depth is None else [int(depth)])))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

        def backward(x, y):
            with device.autocast(precision == "bf16"):
                value = models.loss(model(x.to("cuda")), y.to("cuda"))
            value.backward()
            return value

        ordinary = _ordinary(counts, dataset, backward, optimizer)
        return {"ordinary": ordinary, **_private(counts, dataset, backward, optimizer, model, style, mode, offload)}


def _ordinary(counts, dataset, backward, optimizer):
    counts.reset()
    for rows in ((0, 1, 2, 3), (4, 5, 6, 6)):
        backward(*(x[list(rows)] for x in dataset.tensors))
    optimizer.zero_grad()
    return _figures(counts)


def _private(counts, dataset, backward, optimizer, model, style, mode, offload):
    from torch.utils._python_dispatch import _disable_current_modes

    from dpshard import PrivacyEngine

    n, anchors = len(dataset), _watched_anchors()
    with _disable_current_modes():
        engine = PrivacyEngine(
            model, batch_size=n, sample_size=n, steps=STEPS, noise_multiplier=1.0, target_delta=1e-2,
            accountant="rdp", verify=False, clipping_style=style, clipping_mode=mode,
            offload_records=offload is not None,
        )  # fmt: skip
    try:
        for batch in _with_numbers(engine.batches(dataset, B)):
            counts.reset()
            for x, y in _with_numbers(iter(batch)):
                engine.record_loss(backward(x, y))
            trained = _figures(counts)
            optimizer.step()
            released = _figures(counts)
            engine.metrics()
            read = _figures(counts)
            optimizer.zero_grad()
        return {"private": trained, "release": released, "metrics": read, "anchors": anchors}
    finally:
        engine.detach()


def _watched_anchors():
    from dpshard.clipping.autograd_nodes import Anchor

    backward, found = Anchor.backward, [0, 0]

    def watching(ctx, *gradients):
        found[0] += 1
        found[1] += all(gradient is None for gradient in gradients)
        return backward(ctx, *gradients)

    Anchor.backward = staticmethod(watching)
    return found


def _with_numbers(iterator):
    """Take every item outside of the modes: data on the host has numbers."""
    from torch.utils._python_dispatch import _disable_current_modes

    while True:
        with _disable_current_modes():
            item = next(iterator, None)
        if item is None:
            return
        yield item


def _figures(counts):
    found = {"launches": dict(counts.launches), "waits": dict(counts.waits)}
    counts.reset()
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
