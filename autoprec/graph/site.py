"""A site: one place in a model where a precision is chosen."""

from dataclasses import dataclass

#: Ops whose cost is a matrix product or convolution; only these count in FLOP shares.
GEMM_OPS = frozenset(
    {
        "linear",
        "matmul",
        "mm",
        "bmm",
        "mv",
        "addmm",
        "addbmm",
        "baddbmm",
        "addmv",
        "einsum",
        "tensordot",
        "bilinear",
        "chain_matmul",
        "linalg_multi_dot",
        "inner",
        "grouped_mm",
        "_grouped_mm",
        "conv1d",
        "conv2d",
        "conv3d",
        "conv_transpose1d",
        "conv_transpose2d",
        "conv_transpose3d",
        "scaled_dot_product_attention",
        "multi_head_attention_forward",
        "lstm",
        "gru",
        "rnn_tanh",
        "rnn_relu",
        "lstm_cell",
        "gru_cell",
        "rnn_tanh_cell",
        "rnn_relu_cell",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One overridable torch call, named by the module whose forward makes it.

    Args:
        module: FQN of that module as ``named_modules()`` gives it; ``""`` is the root.
        op: canonical op name (``matmul`` for ``@``, ``torch.matmul`` and ``Tensor.matmul``).
        index: the k-th call of ``op`` with a floating argument inside one activation of the forward.
        method: the method that makes the call, where it isn't ``forward``.
        leaf: the module is a ``torch.nn`` layer whose forward is this one op.
        input_shapes, output_shapes: of the floating tensors, as recorded.
        flops: multiply-adds times two of one forward call; 0 for ops that aren't GEMMs.
        num_params: elements of the parameters among the arguments.
    """

    module: str
    op: str
    index: int = 0
    method: str = "forward"
    leaf: bool = False
    input_shapes: tuple[tuple[int, ...], ...] = ()
    output_shapes: tuple[tuple[int, ...], ...] = ()
    flops: int = 0
    num_params: int = 0

    @property
    def scope(self) -> str:
        """``fqn``, or ``fqn:method`` for a method other than forward."""
        return self.module if self.method == "forward" else f"{self.module}:{self.method}"

    @property
    def id(self) -> str:
        """``fqn`` for a leaf layer, else ``fqn::op#k`` or ``fqn:method::op#k``."""
        return self.module if self.leaf else f"{self.scope}::{self.op}#{self.index}"

    @property
    def aliases(self) -> tuple[str, ...]:
        """What a plan's globs are matched against, most specific first."""
        named = (f"{self.scope}::{self.op}#{self.index}", f"{self.scope}::{self.op}")
        return (self.module, *named) if self.leaf else named

    @property
    def is_gemm(self) -> bool:
        return self.op in GEMM_OPS
