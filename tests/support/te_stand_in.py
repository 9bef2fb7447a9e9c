"""Stand-in on the CPU for TransformerEngine's ``make_graphed_callables``, with its signature.

It captures and replays like the original, with the backend that it gets as ``pool``. It warms up
with made-up gradients and leaves out parameters that get no gradient. It uses its own static
buffers. After an error it leaves garbage collection disabled, as the original does. The stand-in is
stricter in one respect: memory that the original returns to the pool after a backward pass is
filled with NaN.
"""

import gc

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from megatron_packed.cuda_graphs.transformer_engine import Maker


def make_graphed_callables(
    modules,
    sample_args,
    num_warmup_iters=3,
    allow_unused_input=False,
    sample_kwargs=None,
    fp8_enabled=None,
    fp8_calibrating=None,
    fp8_recipe=None,
    fp8_group=None,
    fp8_weight_caching=None,
    enabled=None,
    calibrating=None,
    recipe=None,
    amax_reduction_group=None,
    cache_quantized_params=None,
    _order=None,
    _num_layers_per_chunk=None,
    pool=None,
    retain_graph_in_backward=False,
    _reuse_graph_input_output_buffers=False,
    clone_param_grads_on_return=True,
    pre_warmup_hook=None,
    post_warmup_hook=None,
    capture_time_hooks=None,
):
    assert (
        _order == [1, -1]
        and _reuse_graph_input_output_buffers
        and not enabled
        and not sample_kwargs
    )
    assert isinstance(modules, tuple) and len(modules) == len(sample_args) == len(
        capture_time_hooks
    )
    assert all(isinstance(module, torch.nn.Module) and module.training for module in modules)
    wrapped = {type(module): type(module).__call__ for module in modules}
    for kind, call in wrapped.items():
        kind.__call__ = lambda self, *args, call=call: call(self, *args)
    gc.disable()
    captures = [
        _Capture(module, args, hooks, pool)
        for module, args, hooks in zip(modules, sample_args, capture_time_hooks)
    ]
    pre_warmup_hook()
    for number in range(num_warmup_iters):
        outputs = [one.warm_up_forward() for one in captures]
        for one in reversed(captures):
            one.warm_up_backward(outputs.pop(), number)
    post_warmup_hook()
    try:
        for one in captures:
            one.capture_forward()
        later = None
        for one in reversed(captures):
            one.capture_backward(later)
            later = one
    except BaseException:
        for one in captures:
            one.reset()  # TransformerEngine keeps no reference to graphs after an error
        raise
    gc.enable()
    for kind, call in wrapped.items():
        kind.__call__ = call
    return tuple(one.graphed() for one in captures)


def stand_in():
    """Return the stand-in, and a list that gets an entry for each aborted capture."""
    told = []
    return Maker(make_graphed_callables, lambda: told.append(1)), told


class _Capture:
    def __init__(self, module, args, hooks, backend):
        self.module, self.args, self.hooks, self.backend = module, args, hooks, backend
        assert not module._forward_hooks and not module._backward_hooks
        assert all(isinstance(arg, torch.Tensor) for arg in args)
        self.parameters = tuple(module.parameters())
        self.forward_graph = self.backward_graph = None

    def announce(self, name):
        for hook in self.hooks.get(name, {}).values():
            assert hook(self.module) is None

    def surface(self):
        return [tensor for tensor in (*self.args, *self.parameters) if tensor.requires_grad]

    def run_backward(self, outputs, grads):
        """Run backward into ``grad`` as when it is captured, and restore the previous gradients."""
        inputs = self.surface()
        kept = [tensor.grad for tensor in inputs]
        for tensor in inputs:
            tensor.grad = None
        torch.autograd.backward(outputs, grads)
        found = [tensor.grad for tensor in inputs]
        for tensor, grad in zip(inputs, kept):
            tensor.grad = grad
        return found

    def warm_up_forward(self):
        self.announce("forward_pre_hooks")
        return tree_flatten(self.module(*self.args))[0]

    def warm_up_backward(self, outputs, number):
        wanted = [output for output in outputs if output.requires_grad]
        self.announce("backward_pre_hooks")
        found = self.run_backward(
            wanted, [torch.full_like(output, float("nan")) for output in wanted]
        )
        if found[0] is None:
            raise RuntimeError(
                "The input tensor requires grad, but the grad is None after backward pass."
            )
        getting = tuple(p for p, grad in zip(self.surface()[1:], found[1:]) if grad is not None)
        if len(getting) != len(self.parameters):
            assert number == 0
            self.parameters = getting

    def capture_forward(self):
        self.announce("forward_pre_hooks")

        def forward():
            with torch.inference_mode(False), torch.enable_grad():
                outputs, self.spec = tree_flatten(self.module(*self.args))
            self.live = [output for output in outputs if output.requires_grad]
            self.differ = [output.requires_grad for output in outputs]
            return [
                output.detach().clone(memory_format=torch.contiguous_format) for output in outputs
            ]

        self.forward_graph, self.outputs = self.capture(forward)

    def capture_backward(self, later):
        self.announce("backward_pre_hooks")
        self.later = later
        self.grads = [
            torch.empty_like(o) if differs else None
            for o, differs in zip(self.outputs, self.differ)
        ]

        def backward():
            with torch.enable_grad():
                found = self.run_backward(
                    self.live, [grad for grad in self.grads if grad is not None]
                )
            return [torch.zeros(0) if grad is None else grad for grad in found]

        self.backward_graph, self.found = self.capture(backward)

    def capture(self, function):
        try:
            return self.backend.capture(function)
        except Exception:
            raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904 - as torch does

    def give_back(self):
        for tensor in (*self.outputs, *(self.later.found if self.later else ())):
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))

    def reset(self):
        for graph in (self.forward_graph, self.backward_graph):
            if graph is not None:
                graph.reset()

    def graphed(self):
        capture = self

        class Graphed(torch.autograd.Function):
            @staticmethod
            def forward(ctx, *inputs):
                for static, brought in zip(capture.args, inputs):
                    if static.data_ptr() != brought.data_ptr():
                        static.copy_(brought)
                capture.forward_graph.replay()
                return tuple(output.detach() for output in capture.outputs)

            @staticmethod
            @torch.autograd.function.once_differentiable
            def backward(ctx, *grads):
                for static, grad in zip(capture.grads, grads, strict=True):
                    if static is not None and static.data_ptr() != grad.data_ptr():
                        static.copy_(grad)
                capture.backward_graph.replay()
                capture.give_back()
                hidden, *others = capture.found
                return (hidden.detach(), *(grad.detach().clone() for grad in others))

        def function(*args):
            return tree_unflatten(Graphed.apply(*args, *self.parameters), self.spec)

        function.reset, function.backward_dw = self.reset, lambda: None
        return function
