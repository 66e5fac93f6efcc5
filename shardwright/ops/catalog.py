"""The catalog: a row an operator, what a node of a graph is by it, and what files may call.

A row's rule depends on a call's shapes and attributes only, so equal calls (the layers of a stack)
are bound once. An operator is looked up among those that `register` knows, then in the rows, then
by running it (`discover`).
"""

from __future__ import annotations

from collections.abc import Mapping

from shardwright.ir import WITH_BACKWARD, IRGraph, IRNode
from shardwright.ir.operators import is_built_in, is_marker
from shardwright.ops.bound import BoundDimop, bind
from shardwright.ops.call import CatalogCall, OperatorRow
from shardwright.ops.discover import infer_rule
from shardwright.ops.register import bind_registered, registered
from shardwright.ops.rows import contraction, elementwise, indexing, layers, reductions, views
from shardwright.ops.rows.with_backward import with_backward

ROWS: Mapping[str, OperatorRow] = {
    **elementwise.ROWS,
    **contraction.ROWS,
    **views.ROWS,
    **reductions.ROWS,
    **layers.ROWS,
    **indexing.ROWS,
}
"""By the operator's name."""


def call_of(graph: IRGraph, node: IRNode) -> CatalogCall:
    """A node as a `CatalogCall`."""
    inputs = [graph.values[value_id] for value_id in node.inputs]
    return CatalogCall(
        node.op,
        tuple(value.shape for value in inputs),
        tuple(graph.values[value_id].shape for value_id in node.outputs),
        node.attrs,
        tuple(value.dtype for value in inputs),
    )


def dimop_of(graph: IRGraph, node: IRNode) -> BoundDimop | None:
    """What is known of splitting a node; None where it is to be replicated (see `why_whole`)."""
    found = _find(graph, node)
    return found if isinstance(found, BoundDimop) else None


def why_whole(graph: IRGraph, node: IRNode) -> str | None:
    """Why a node can only be replicated; None where it can be split."""
    found = _find(graph, node)
    if isinstance(found, str):
        return found
    if found.identifiers:
        return None
    return f"{found}: no dimension of it may be split"


_known: dict[tuple[object, ...], BoundDimop | str] = {}
"""What was found, by what a rule depends on."""


def _find(graph: IRGraph, node: IRNode) -> BoundDimop | str:
    if is_marker(node.op):
        return f"{node.op} is a marker, which lowering expands"
    call = call_of(graph, node)
    key = (call.op, call.inputs, call.outputs, call.dtypes, repr(call.attrs), registered(call.op))
    if key not in _known:
        _known[key] = _look_up(call)
    return _known[key]


def _look_up(call: CatalogCall) -> BoundDimop | str:
    if (operator := registered(call.op)) is not None:
        return bind_registered(operator, call)
    if call.op == WITH_BACKWARD:
        return bind(call, with_backward(call, dimop_of))
    row = ROWS.get(call.op)
    if row is not None and row.rule is not None:
        rule = row.rule(call)
        return bind(call, rule) if rule else f"{call.op}: {NOT_ALIKE}"
    inferred = infer_rule(call)
    if isinstance(inferred, str):
        return f"{call.op} has no row in the catalog, and no annotation was found: {inferred}"
    return bind(call, inferred, "inferred")


NOT_ALIKE = "this call draws random numbers, or its result's size depends on the values"
"""Why a row has no rule for a call."""


# --- operators that a pipeline file may call ------------------------------------------------------
#
# An allow-list: what capture and differentiation emit (the rows, the operators below), this
# package's own, and what the user registered. What torch has besides (sparse and nested tensors,
# packed weights, raw storages, CTC, packed sequences) no file may call. Some of the operators here
# trust their arguments: `ir.trusting` says what must hold of these.

_ELEMENTWISE = """
    __and__ __lshift__ __or__ __rshift__ __xor__ _conj _conj_physical _prelu_kernel absolute arccos
    arccosh arcsin arcsinh arctan arctan2 arctanh bitwise_and bitwise_left_shift bitwise_or
    bitwise_right_shift bitwise_xor conj copysign divide fill fix float_power frexp gcd greater
    greater_equal i0 igamma igammac isin isneginf isposinf isreal lcm ldexp less less_equal
    log_sigmoid_forward lift lift_fresh multiply mvlgamma negative polygamma resolve_conj
    resolve_neg
    rsub signbit sinc special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1
    special_digamma special_entr special_erf special_erfc special_erfcx special_erfinv special_exp2
    special_expm1 special_expit special_gammainc special_gammaincc special_gammaln special_i0
    special_i0e special_i1 special_i1e special_log1p special_log_ndtr special_log_softmax
    special_logit special_logsumexp special_modified_bessel_i0 special_modified_bessel_i1
    special_modified_bessel_k0 special_modified_bessel_k1 special_multigammaln special_ndtr
    special_ndtri special_polygamma special_psi special_round special_sinc special_softmax
    special_xlog1py special_xlogy special_zeta subtract where xlogy zero
"""
_REDUCTIONS = """
    _aminmax _is_all_true _is_any_true _logcumsumexp _cummax_helper _cummin_helper corrcoef cov
    cosine_embedding_loss cumulative_trapezoid dist equal hinge_embedding_loss
    histogram linalg_matrix_norm linalg_norm linalg_vecdot margin_ranking_loss multi_margin_loss
    multilabel_margin_loss_forward nanmean nanmedian nll_loss2d_forward
    nll_loss_forward norm norm_except_dim nuclear_norm pairwise_distance quantile nanquantile
    smooth_l1_loss std_mean trapezoid trapz triplet_margin_loss var_mean vdot
"""
_VIEWS = """
    _reshape_copy adjoint as_strided as_strided_copy as_strided_scatter atleast_1d atleast_2d
    atleast_3d block_diag cartesian_prod channel_shuffle column_stack combinations concatenate copy
    detach_copy diag diag_embed diagflat diagonal_copy diagonal_scatter dsplit dstack expand_copy
    fliplr flipud hsplit hstack kron lift_fresh_copy mH matrix_H meshgrid moveaxis movedim
    narrow_copy native_channel_shuffle numpy_T pad_sequence permute_copy pixel_shuffle reshape_as
    resolve_conj rot90 row_stack select_copy select_scatter slice_copy slice_scatter sort sorted
    split split_copy split_with_sizes_copy squeeze_copy swapaxes t_copy take_along_dim tensor_split
    trace transpose_copy tril_indices triu_indices unbind_copy unfold_copy unsafe_split
    unsafe_split_with_sizes unsqueeze_copy vander view view_as view_as_complex_copy
    view_as_real_copy view_copy vsplit vstack
"""
_CONTRACTIONS = """
    _cdist_forward _convolution _euclidean_dist _grouped_mm _int_mm _trilinear addr cdist
    _weight_int8pack_mm
    chain_matmul convolution_overrideable cross ger inner linalg_cross linalg_multi_dot
    linalg_matmul matrix_power linalg_matrix_power tensordot
"""
_LINEAR_ALGEBRA = """
    _linalg_det _linalg_eigh _linalg_eigvals _linalg_slogdet _linalg_solve_ex _linalg_svd cholesky
    cholesky_inverse cholesky_solve det inverse linalg_cholesky linalg_cholesky_ex linalg_cond
    linalg_det linalg_diagonal linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh linalg_inv
    linalg_inv_ex linalg_lu linalg_lu_factor linalg_lu_factor_ex linalg_lu_solve linalg_matrix_exp
    linalg_matrix_rank linalg_pinv linalg_qr linalg_slogdet linalg_solve linalg_solve_ex
    linalg_solve_triangular linalg_svd linalg_svdvals linalg_tensorinv linalg_tensorsolve logdet
    lu_unpack matrix_exp pinverse qr slogdet svd triangular_solve
"""
_FOURIER = """
    _fft_c2c _fft_c2r _fft_r2c fft_fft fft_fft2 fft_fftfreq fft_fftn fft_fftshift fft_hfft fft_ifft
    fft_ifft2 fft_ifftn fft_ifftshift fft_ihfft fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2
    fft_rfftfreq fft_rfftn istft stft hann_window hamming_window blackman_window bartlett_window
    kaiser_window
"""
_LAYERS = """
    _adaptive_avg_pool2d _adaptive_avg_pool3d _fused_rms_norm _native_batch_norm_legit
    _scaled_dot_product_attention_math _scaled_dot_product_flash_attention_for_cpu _weight_norm
    _weight_norm_interface affine_grid_generator col2im conv_tbc conv_transpose1d conv_transpose2d
    conv_transpose3d embedding_bag feature_alpha_dropout grid_sampler_2d grid_sampler_3d gru_cell
    im2col lstm_cell max_unpool2d max_unpool3d native_batch_norm
    native_dropout native_group_norm native_norm renorm rnn_relu_cell rnn_tanh_cell rrelu
    rrelu_with_noise_functional upsample_bicubic2d upsample_bilinear2d upsample_linear1d
    upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d
    _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d
    _upsample_nearest_exact2d _upsample_nearest_exact3d
"""
_INDEXING = """
    _unsafe_index _unsafe_index_put _unsafe_masked_index _unsafe_masked_index_put_accumulate
    bucketize gather index index_add index_copy index_fill index_put index_reduce index_select
    masked_scatter nonzero_static put repeat_interleave scatter scatter_add scatter_reduce
    searchsorted take
"""
_FACTORIES = """
    bernoulli empty empty_permuted empty_strided eye linspace logspace multinomial new_empty
    new_empty_strided normal poisson rand rand_like randint randint_like randn randn_like randperm
"""
_BACKWARDS = """
    _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward _cdist_backward
    _fused_rms_norm_backward _log_softmax_backward_data _prelu_kernel_backward
    _scaled_dot_product_flash_attention_for_cpu_backward _softmax_backward_data
    _weight_norm_differentiable_backward _weight_norm_interface_backward
    _upsample_bicubic2d_aa_backward _upsample_bilinear2d_aa_backward
    _upsample_nearest_exact1d_backward _upsample_nearest_exact2d_backward
    _upsample_nearest_exact3d_backward adaptive_max_pool2d_backward adaptive_max_pool3d_backward
    avg_pool2d_backward avg_pool3d_backward binary_cross_entropy_backward convolution_backward
    cumprod_backward cummaxmin_backward diagonal_backward elu_backward
    embedding_dense_backward gather_backward gelu_backward glu_backward grid_sampler_2d_backward
    grid_sampler_3d_backward hardshrink_backward hardsigmoid_backward hardswish_backward
    hardtanh_backward huber_loss_backward index_select_backward
    infinitely_differentiable_gelu_backward leaky_relu_backward linear_backward
    log_sigmoid_backward logit_backward masked_select_backward matmul_backward matrix_exp_backward
    max_pool2d_with_indices_backward max_pool3d_with_indices_backward mish_backward
    mse_loss_backward native_batch_norm_backward native_dropout_backward
    native_group_norm_backward native_layer_norm_backward nll_loss2d_backward nll_loss_backward
    reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward
    replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward
    rrelu_with_noise_backward select_backward sigmoid_backward silu_backward slice_backward
    smooth_l1_loss_backward soft_margin_loss_backward softplus_backward softshrink_backward
    tanh_backward threshold_backward trace_backward unfold_backward upsample_bicubic2d_backward
    upsample_bilinear2d_backward upsample_linear1d_backward upsample_nearest1d_backward
    upsample_nearest2d_backward upsample_nearest3d_backward upsample_trilinear3d_backward
    value_selecting_reduction_backward
"""
_UPDATES = """
    _amp_foreach_non_finite_check_and_unscale _amp_update_scale _foreach_abs _foreach_add
    _foreach_addcdiv _foreach_addcmul _foreach_clamp_max _foreach_clamp_min _foreach_copy
    _foreach_div _foreach_exp _foreach_lerp _foreach_max _foreach_maximum _foreach_minimum
    _foreach_mul _foreach_neg _foreach_norm _foreach_pow _foreach_reciprocal _foreach_rsqrt
    _foreach_sign _foreach_sqrt _foreach_sub _foreach_zero _fused_adagrad _fused_adam _fused_adamw
    _fused_sgd
"""
_CUDA = """
    _scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward
    _scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward
    _thnn_fused_gru_cell _thnn_fused_gru_cell_backward _thnn_fused_lstm_cell
    _thnn_fused_lstm_cell_backward_impl cudnn_batch_norm cudnn_batch_norm_backward
"""

_FAMILIES = (
    _ELEMENTWISE,
    _REDUCTIONS,
    _VIEWS,
    _CONTRACTIONS,
    _LINEAR_ALGEBRA,
    _FOURIER,
    _LAYERS,
    _INDEXING,
    _FACTORIES,
    _BACKWARDS,
    _UPDATES,
    _CUDA,
)


def _operator(op: str) -> str:
    """``aten.add.Tensor`` is of the operator ``add``."""
    return op.split(".")[1]


ALLOWED = frozenset(
    {*(_operator(op) for op in ROWS if op.startswith("aten.")), *" ".join(_FAMILIES).split()}
)
"""Operators of torch, all functional overloads of each."""


def is_allowed(op: str) -> bool:
    """Whether a file may call an operator; all that users registered it may."""
    return not is_built_in(op) or op.startswith("shardwright.") or _operator(op) in ALLOWED


REFUSED = (
    "calls {}, which no file may: it is none of the operators that capture emits (see "
    "docs/security.md); register an operator of your own that does this (sw.register_op)"
)
"""What is said of a call of any other."""
