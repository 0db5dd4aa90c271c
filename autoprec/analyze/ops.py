"""Kinds of ops that the analysis tells apart, by canonical name."""

#: Move or pick values; nothing is rounded that wasn't.
MOVES = frozenset({
    "view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "permute", "transpose", "t", "movedim",
    "moveaxis", "swapaxes", "swapdims", "expand", "expand_as", "broadcast_to", "broadcast_tensors", "contiguous",
    "clone", "detach", "chunk", "split", "split_with_sizes", "unbind", "tensor_split", "repeat", "repeat_interleave",
    "tile", "flip", "roll", "rot90", "tril", "triu", "diag", "diagonal", "diag_embed", "unfold", "pad", "narrow",
    "select", "index", "gather", "index_select", "take", "take_along_dim", "masked_select", "cat", "stack", "hstack",
    "vstack", "dstack", "column_stack", "row_stack", "relu", "maximum", "minimum", "neg", "abs", "view_as",
    "reshape_as", "as_strided", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "max", "min", "amax", "amin",
    "sort", "topk", "embedding", "max_pool1d", "max_pool2d", "where", "copy", "__get__", "size", "identity", "alias",
    "cuda", "cpu",
})  # fmt: skip

#: Of those, the ones without any test on the values: a chain of moves.
SHAPES = MOVES - {"relu", "maximum", "minimum", "max", "min", "amax", "amin", "sort", "topk", "abs", "neg", "where"}

#: Numbers counted out: the origin of positions.
POSITIONS = frozenset(
    {"arange", "range", "linspace", "logspace", "fft_fftfreq", "fft_rfftfreq", "tril_indices", "triu_indices"}
)

FACTORIES = frozenset({
    "tensor", "as_tensor", "from_numpy", "zeros", "ones", "empty", "full", "eye", "scalar_tensor", "complex",
    "hann_window", "hamming_window", "blackman_window", "bartlett_window", "kaiser_window",
})  # fmt: skip

#: Take their shape from a tensor, and nothing else.
LIKE_FACTORIES = frozenset({
    "zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_ones", "new_empty", "new_full",
    "new_tensor",
})  # fmt: skip

RANDOM_FACTORIES = frozenset(
    {"rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal"}
)

COMPARISONS = frozenset({
    "gt", "lt", "ge", "le", "eq", "ne", "greater", "less", "greater_equal", "less_equal", "not_equal", "isnan", "isinf",
    "isfinite", "isclose", "__gt__", "__lt__", "__ge__", "__le__", "__eq__", "__ne__", "signbit", "logical_not",
})  # fmt: skip

#: Pick one of several by value: a rounding picks another.
SELECTIONS = frozenset({
    "topk", "argmax", "argmin", "argsort", "sort", "msort", "kthvalue", "multinomial", "searchsorted", "bucketize",
    "max", "min", "median", "mode", "unique", "unique_consecutive",
})  # fmt: skip

#: Bring a number to a grid of whole ones: a rounding across a step is an error of a whole step.
ROUNDINGS = frozenset({"round", "floor", "ceil", "trunc", "fix", "floor_divide", "long", "int", "int32", "int64"})

#: Decompositions and solvers, which multiply a rounding by the condition number.
DECOMPOSITIONS_PREFIX = ("linalg_",)
DECOMPOSITIONS = frozenset({
    "cholesky", "cholesky_inverse", "cholesky_solve", "det", "geqrf", "lobpcg", "logdet", "lu", "lu_solve",
    "matrix_exp", "matrix_power", "orgqr", "ormqr", "pca_lowrank", "pinverse", "qr", "slogdet", "svd", "svd_lowrank",
    "triangular_solve", "cdist", "inverse",
})  # fmt: skip

#: Of the ``linalg_`` names, those that are plain products and norms.
NO_DECOMPOSITIONS = frozenset({
    "linalg_norm", "linalg_vector_norm", "linalg_matrix_norm", "linalg_vecdot", "linalg_cross", "linalg_multi_dot",
    "linalg_diagonal", "linalg_matmul",
})  # fmt: skip

#: Layers that bring values to unit scale: what is below them is another region.
NORMS = frozenset({
    "layer_norm", "native_layer_norm", "rms_norm", "group_norm", "native_group_norm", "batch_norm", "instance_norm",
    "normalize", "local_response_norm",
})  # fmt: skip

PHASES = frozenset({"sin", "cos", "tan", "polar", "sinc"})

#: A constant beyond this is a mark, not a value: ``-1e9``, ``finfo(float32).min``.
SENTINEL = 32768.0


def is_decomposition(op: str) -> bool:
    """Whether an op multiplies errors of its input by a condition number."""
    return op in DECOMPOSITIONS or (op.startswith(DECOMPOSITIONS_PREFIX) and op not in NO_DECOMPOSITIONS)
