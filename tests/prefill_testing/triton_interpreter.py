"""Triton's CPU interpreter made fit to check kernels: number formats as on the chip, bounds, races, undefined values.

Used by tests/kernels/gpu/conftest.py around each test there; `interpreted()` patches triton and takes the patches back, so
modules that were imported before stay compiled kernels for everyone else. The stock interpreter keeps bfloat16 and fp8 as
integers, computes on these bits and truncates casts; here such operands are widened to float32 and results rounded by torch
(nearest even; fp8 saturates, as cvt.rn.satfinite does). What no interpreter shows: speed, registers, the chip's exp and
division, the order in which the matrix unit adds, and races within one program.
"""

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import triton
import triton.knobs as knobs
import triton.language as tl
import triton.runtime.interpreter as stock
from torch import Tensor
from triton.runtime.errors import InterpreterError
from triton.runtime.jit import JITFunction

from prefill_testing.interpreter_memory import LaunchMemory

Method = Callable[..., Any]
Handle = stock.TensorHandle

_STORED = {tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
"""Formats that the interpreter holds as unsigned integers."""
_LAUNCH_OPTIONS = {"num_warps", "num_stages", "num_ctas", "enable_fp_fusion", "maxnreg", "launch_pdl"}
_POISON_BYTE = 0xA5
_ABSENT = object()


@contextmanager
def interpreted() -> Iterator[None]:
    """Runs every @triton.jit function in the repaired interpreter, this process only, until the block ends.

    Functions that are decorated inside the block stay interpreted for good.
    """
    with _patched(_patches()), _knob_on(), _patched_language():
        yield


@contextmanager
def _knob_on() -> Iterator[None]:
    """TRITON_INTERPRET as seen by triton, without the environment variable that child processes would inherit."""
    propagate, knobs.propagate_env = knobs.propagate_env, False
    before = knobs.runtime.interpret
    knobs.runtime.interpret = True
    try:
        yield
    finally:
        knobs.runtime.interpret = before
        knobs.propagate_env = propagate


@contextmanager
def _patched(patches: list[tuple[Any, str, Any]]) -> Iterator[None]:
    before = [(owner, name, vars(owner).get(name, _ABSENT)) for owner, name, _ in patches]
    for owner, name, value in patches:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in reversed(before):
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


@contextmanager
def _patched_language() -> Iterator[None]:
    """tl and tl.core become the interpreter's once, not at every launch and device call as in the stock one."""
    namespace = {"tl": tl, "core": tl.core}
    scope = stock._patch_lang(type("Fn", (), {"__globals__": namespace}))
    scope.set_attr(tl.tensor, "__index__", lambda self: int(self.handle.data.squeeze()))
    with _patched([(stock, "_patch_lang", lambda _fn: stock._LangPatchScope())]):
        try:
            yield
        finally:
            scope.restore()


def _patches() -> list[tuple[Any, str, Any]]:
    """(owner, name, replacement) of all that changes in triton."""
    builder, memory = stock.InterpreterBuilder, _Memory()
    through_float32 = ("binary_op", "unary_op", "ternary_op", "create_fma", "create_rsqrt", "create_erf")
    patches: list[tuple[Any, str, Any]] = [
        (builder, name, _in_float32(getattr(builder, name))) for name in through_float32
    ]
    patches += [
        (JITFunction, "run", _run),
        # Checks of integer overflow are made and thrown away (their assertion is off): a third of the time.
        (stock.interpreter_builder, "options", replace(stock.interpreter_builder.options, sanitize_overflow=False)),
        (JITFunction, "__call__", _call),
        (stock, "_implicit_cvt", _one_is_constexpr(stock._implicit_cvt)),
        (stock.GridExecutor, "__call__", _launch(stock.GridExecutor.__call__, memory)),
        (stock.ReduceScanOpInterface, "apply", _refuse_stored(stock.ReduceScanOpInterface.apply)),
        (builder, "cast_impl", _cast(builder.cast_impl)),
        (builder, "create_fp_to_fp", _fp_to_fp(builder.create_fp_to_fp)),
        (builder, "get_bf16", lambda self, value: self.cast_impl(self.get_fp32(value), tl.bfloat16)),
        # Triton 3.6: NaN wins; and its int(array of one) is an error in numpy 2.4 (below).
        (builder, "create_maxnumf", lambda self, left, right: self.binary_op(left, right, np.fmax)),
        (builder, "create_minnumf", lambda self, left, right: self.binary_op(left, right, np.fmin)),
        (builder, "create_dot", _dot(builder.create_dot)),
        (builder, "create_masked_load", memory.load(builder.create_masked_load)),
        (builder, "create_masked_store", memory.store(builder.create_masked_store)),
        (builder, "create_atomic_rmw", memory.atomic(builder.create_atomic_rmw)),
        (builder, "create_atomic_cas", memory.atomic(builder.create_atomic_cas)),
    ]
    if hasattr(stock, "_mxfp_value_handle_to_float32"):
        patches.append((stock, "_mxfp_value_handle_to_float32", lambda handle: _wide(handle)))
    return patches


# ---- number formats


def widen(bits: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """float32 values of stored bits."""
    if dtype == tl.bfloat16:
        return (bits.astype(np.uint32) << 16).view(np.float32)
    codes = torch.arange(256, dtype=torch.uint8).view(_STORED[dtype])
    return codes.float().numpy()[bits]


def narrow(values: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """Stored bits of float32 values: nearest even; fp8 clamps to its largest finite value, NaN stays NaN."""
    wide = torch.from_numpy(np.require(values, np.float32, ["C", "W"]))
    if dtype == tl.bfloat16:
        return wide.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16).reshape(np.shape(values))
    limit = torch.finfo(_STORED[dtype]).max
    return wide.clamp(-limit, limit).to(_STORED[dtype]).view(torch.uint8).numpy().reshape(np.shape(values))


def _is_stored(handle: Any) -> bool:
    # The stock interpreter labels comparison results with the operands' type; their data is bool.
    is_value = isinstance(handle, Handle) and not handle.dtype.scalar.is_ptr()  # pointer types cannot be hashed
    return is_value and handle.dtype.scalar in _STORED and handle.data.dtype.kind == "u"


def _wide(handle: Handle) -> np.ndarray:
    data: np.ndarray = handle.data
    return widen(data, handle.dtype.scalar) if _is_stored(handle) else data


def _in_float32(original: Method) -> Method:
    """An element-wise builder method that computes on float32 where operands are stored formats."""

    def method(self: Any, *args: Any) -> Any:
        dtype = next((arg.dtype.scalar for arg in args if _is_stored(arg)), None)
        # A select moves bits only.
        if dtype is None or args[-1] is np.where:
            return original(self, *args)
        result = original(self, *(Handle(_wide(arg), tl.float32) if _is_stored(arg) else arg for arg in args))
        if result.data.dtype == np.bool_:
            return Handle(result.data, tl.int1)
        return Handle(narrow(result.data, dtype), dtype)

    return method


def _cast(original: Method) -> Method:
    def method(self: Any, src: Handle, dst_type: Any) -> Any:
        target = dst_type.scalar
        if target in _STORED:
            return Handle(narrow(_wide(src).astype(np.float32), target), target)
        if _is_stored(src):
            return Handle(_wide(src).astype(stock._get_np_dtype(target)), target)
        return original(self, src, dst_type)

    return method


def _fp_to_fp(original: Method) -> Method:
    def method(self: Any, src: Handle, dst_type: Any, rounding: Any) -> Any:
        if dst_type.scalar not in _STORED and not _is_stored(src):
            return original(self, src, dst_type, rounding)
        if rounding is not None and not str(rounding).endswith("RTNE"):
            raise NotImplementedError(f"cast to {dst_type} with rounding {rounding}: expected nearest even")
        return self.cast_impl(src, dst_type)

    return method


def _dot(original: Method) -> Method:
    def method(self: Any, a: Handle, b: Handle, acc: Handle, precision: Any, imprecise: Any) -> Any:
        if a.data.dtype.kind != "f" and not _is_stored(a):
            return original(self, a, b, acc, precision, imprecise)
        left, right = (np.require(_wide(side), np.float32, ["C", "W"]) for side in (a, b))
        if a.dtype.scalar == tl.float32 and str(precision).endswith("TF32"):
            # The matrix unit reads the upper 19 bits.
            left, right = ((side.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32) for side in (left, right))
        # By torch: numpy's threads fight over the cores unless an environment variable says so.
        product = torch.matmul(torch.from_numpy(left), torch.from_numpy(right)).numpy()
        return Handle((product + acc.data).astype(acc.data.dtype), acc.dtype.scalar)

    return method


def _refuse_stored(original: Method) -> Method:
    def method(self: Any, args: Any) -> Any:
        for arg in args if isinstance(args, tuple) else (args,):
            if _is_stored(arg.handle):
                raise NotImplementedError(
                    f"reduce or scan over {arg.dtype}: expected float32, cast right after the load"
                )
        return original(self, args)

    return method


# ---- launches


def _run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
    return stock.InterpretedFunction(self.fn).run(*args, grid=grid, warmup=warmup, **kwargs)


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    return stock.InterpretedFunction(self.fn).rewrite()(*args, **kwargs)


def _one_is_constexpr(original: Method) -> Method:
    """An integer argument 1 is a constant to the compiler: no tensor, so `.to()` on it fails there and must here."""

    def convert(arg: Any) -> Any:
        return 1 if type(arg) is int and arg == 1 else original(arg)

    return convert


def _launch(original: Method, memory: "_Memory") -> Method:
    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        unknown = set(kwargs) - set(inspect.signature(self.fn).parameters) - _LAUNCH_OPTIONS
        if unknown:
            raise TypeError(f"launch of {self.fn.__name__} with unknown arguments {sorted(unknown)}")
        if not callable(self.grid) and 0 in self.grid:
            raise ValueError(f"launch of {self.fn.__name__} with grid {tuple(self.grid)}: no chip takes an empty one")
        with memory.of([*args, *kwargs.values()]), np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            try:
                original(self, *args, **kwargs)
            except InterpreterError as error:
                raise error.__cause__ or error from None

    return launch


class _Memory:
    """Hands each load and store of the running launch to its LaunchMemory."""

    def __init__(self) -> None:
        self._launch = LaunchMemory([])

    @contextmanager
    def of(self, args: list[Any]) -> Iterator[None]:
        before, self._launch = self._launch, LaunchMemory(list(_tensors(args)))
        try:
            yield
        finally:
            self._launch = before

    def load(self, original: Method) -> Method:
        def method(builder: Any, ptrs: Handle, mask: Handle, other: Handle | None, *rest: Any) -> Any:
            self._launch.load(*_lanes(builder, ptrs, mask))
            if other is None and not mask.data.all():
                other = _poison(ptrs)
            return original(builder, ptrs, mask, other, *rest)

        return method

    def store(self, original: Method) -> Method:
        def method(builder: Any, ptrs: Handle, value: Handle, mask: Handle, *rest: Any) -> Any:
            self._launch.store(*_lanes(builder, ptrs, mask))
            return original(builder, ptrs, value, mask, *rest)

        return method

    def atomic(self, original: Method) -> Method:
        def method(builder: Any, *args: Any) -> Any:
            # rmw: (op, ptr, val, mask, ..); cas: (ptr, cmp, val, ..).
            ptrs, mask = (args[0], None) if isinstance(args[0], Handle) else (args[1], args[3])
            self._launch.atomic(*_lanes(builder, ptrs, mask))
            return original(builder, *args)

        return method


def _lanes(builder: Any, ptrs: Handle, mask: Handle | None) -> tuple[np.ndarray, int, int]:
    """(addresses of the active lanes, bytes of each, serial number of the program)."""
    addresses = ptrs.data.reshape(-1)
    if mask is not None and not mask.data.all():
        shape = np.broadcast_shapes(ptrs.data.shape, mask.data.shape)
        addresses = np.broadcast_to(ptrs.data, shape)[np.broadcast_to(mask.data, shape)]
    (x, y, z), (_, size_y, size_z) = builder.grid_idx, builder.grid_dim
    return addresses, max(1, ptrs.get_element_ty().primitive_bitwidth // 8), (x * size_y + y) * size_z + z


def _poison(ptrs: Handle) -> Handle:
    """What lanes hold that were masked off without `other`: undefined on the chip, so nothing a kernel may count on."""
    dtype = ptrs.get_element_ty()
    data = np.zeros(ptrs.data.shape, stock._get_np_dtype(dtype))
    if dtype.is_floating() and dtype not in _STORED:
        data[...] = np.nan
    elif dtype in _STORED:
        data[...] = narrow(np.array([np.nan], np.float32), dtype)
    else:
        data.view(np.uint8)[...] = 1 if data.dtype == np.bool_ else _POISON_BYTE
    return Handle(data, dtype)


def _tensors(args: Any) -> Iterator[Tensor]:
    for arg in args:
        if isinstance(arg, Tensor):
            yield arg
        elif isinstance(arg, tuple | list):
            yield from _tensors(arg)
        elif isinstance(arg, triton.tools.tensor_descriptor.TensorDescriptor | triton.runtime.jit.TensorWrapper):
            yield arg.base
