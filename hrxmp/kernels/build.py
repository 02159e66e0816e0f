"""Variant + device -> finished binary, and binary -> kernel that can be launched.

The only caller of a source build: workers run it, and the executor in synchronous mode, so both
make the same keys and the same binaries. A binary is finished: whatever the driver leaves to
kernel creation or first launch is forced here. Nothing is kept on disk; the store does that.
"""

from __future__ import annotations

import re
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

import msgspec

from hrxmp.errors import CompileRejectedError, CompileSetupError
from hrxmp.kernels import catalog
from hrxmp.kernels.definition import DeviceTraits, Form, KernelDefinition
from hrxmp.kernels.device import Device
from hrxmp.kernels.instrument import ZONE_BYTES, instrument, revision
from hrxmp.kernels.keys import KeyComponents, Param, Variant
from hrxmp.kernels.loader import device_error, opencl

if TYPE_CHECKING:
    import pyopencl as cl

SANITIZERS = ("", "access", "value", "all")

_OPTIONS = "-cl-std=CL3.0 -cl-mad-enable"
_LOCAL_SIZE_NAMES = ("LX", "LY", "LZ")
_DUMMY_BYTES = 4096


class Built(msgspec.Struct, frozen=True, kw_only=True):
    """A finished binary, and where the time went: compiler, then create + launch + read."""

    binary: bytes
    kind: str
    """Whose binary it is: the device's form."""
    log: str
    compile_ns: int
    create_ns: int
    launch_ns: int
    read_ns: int

    @property
    def finish_ns(self) -> int:
        """What it took to make the driver finish what the compiler had left."""
        return self.create_ns + self.launch_ns + self.read_ns


class Loaded:
    """A kernel of this process, its argument types set. Not thread-safe: arguments are state."""

    def __init__(
        self,
        program: cl._cl._Program,
        kernel: cl.Kernel,
        types: list[str | None],
        *,
        create_ns: int,
        build_ns: int,
        kernel_ns: int,
    ) -> None:
        self.kernel = kernel
        self._program = program
        self._types = types
        self.create_ns = create_ns
        """Making the OpenCL program from the binary."""
        self.build_ns = build_ns
        """Building it: long when the driver compiles again."""
        self.kernel_ns = kernel_ns
        """Making the kernel and its argument setter."""

    @property
    def load_ns(self) -> int:
        """The whole load."""
        return self.create_ns + self.build_ns + self.kernel_ns

    def new_kernel(self) -> cl.Kernel:
        """Another kernel object of the same program, with arguments of its own."""
        kernel = opencl().Kernel(self._program, self.kernel.function_name)
        kernel.set_arg_types(self._types)
        return kernel


def components(
    device: Device, variant: Variant, sanitizer: str = "", extra_options: str = ""
) -> KeyComponents:
    """Everything that can change the binary of `variant` on `device`."""
    definition = _checked_definition(variant)
    shared: dict[str, Any] = shared_components(device, sanitizer, extra_options)
    return KeyComponents(
        source=catalog.source_digest(definition),
        entry_point=definition.entry_point,
        params=variant.params,
        local_size=variant.local_size,
        **shared,
    )


def shared_components(
    device: Device, sanitizer: str = "", extra_options: str = ""
) -> dict[str, Param]:
    """The components that every key on `device` has in common, by name."""
    platform, name, compute_units, driver = device.key_fields()
    return {
        "build_options": f"{_OPTIONS} {extra_options}".strip(),
        "sanitizer": _sanitizer_component(sanitizer),
        "platform": platform,
        "device": name,
        "compute_units": compute_units,
        "driver": driver,
    }


def check_sanitizer(sanitizer: str) -> None:
    """CompileSetupError unless `sanitizer` is one that kernels can be built with."""
    if _kind_of(sanitizer) not in SANITIZERS:
        known = ", ".join(repr(name) for name in SANITIZERS)
        raise CompileSetupError(
            f"the sanitizer {sanitizer!r} does not exist",
            remedy=f"HRXMP_SANITIZER is one of {known}",
        )


def _sanitizer_component(sanitizer: str) -> str:
    """The kind, and the revision of what it puts into a kernel: both make another binary."""
    kind = _kind_of(sanitizer)
    return f"{kind}@{revision()}" if kind in SANITIZERS[1:] else kind


def _kind_of(sanitizer: str) -> str:
    """The kind of a setting or of a key's component."""
    return sanitizer.partition("@")[0]


def checkable(traits: DeviceTraits, sanitizer: str) -> DeviceTraits:
    """The traits that dispatch may see: forms made of inline assembler cannot be checked."""
    if sanitizer not in ("access", "all"):
        return traits
    form: Form = "generic" if traits.form == "nvidia" else traits.form
    return msgspec.structs.replace(traits, byte_tiles=False, form=form)


def build(device: Device, variant: Variant, sanitizer: str = "", extra_options: str = "") -> Built:
    """Compile `variant` and make the driver finish it.

    Raises CompileSetupError (the compiler was not started) or CompileRejectedError (with its log).
    """
    check_sanitizer(sanitizer)
    sanitizer = _kind_of(sanitizer)
    definition = _checked_definition(variant)
    text, options = _source(definition, variant, sanitizer)
    options = f"{_OPTIONS} {options} {extra_options}"
    start = monotonic_ns()
    program = _compile(device, variant, text, options)
    compiled = monotonic_ns()
    kernel = _kernel(program, variant, definition.entry_point)
    created = monotonic_ns()
    dry_launch(device, variant, kernel, sanitizer)
    launched = monotonic_ns()
    binary = _binary(program)
    read = monotonic_ns()
    return Built(
        binary=binary,
        kind=device.traits.form,
        log=_without_chatter(_log(program, device)),
        compile_ns=compiled - start,
        create_ns=created - compiled,
        launch_ns=launched - created,
        read_ns=read - launched,
    )


def load(device: Device, variant: Variant, binary: bytes, sanitizer: str = "") -> Loaded:
    """Make `binary` executable. CompileRejectedError when the driver refuses it (a foreign one)."""
    definition = _checked_definition(variant)
    module = opencl()
    start = monotonic_ns()
    try:
        program = module._cl._Program(device.context, [device.handle], [binary])
        created = monotonic_ns()
        program._build(b"", [device.handle])
        built = monotonic_ns()
        kernel = module.Kernel(program, definition.entry_point)
        types = _types(definition, sanitizer)
        kernel.set_arg_types(types)
    except (module.Error, TypeError) as error:
        raise CompileRejectedError(
            f"the driver refuses the binary of {variant.label()}: {error}", kernel=variant.label()
        ) from error
    return Loaded(
        program,
        kernel,
        types,
        create_ns=created - start,
        build_ns=built - created,
        kernel_ns=monotonic_ns() - built,
    )


_TYPES = {"buffer": None, "int": "int32", "float": "float32"}


def _types(definition: KernelDefinition, sanitizer: str) -> list[str | None]:
    """The kernel's argument types; a sanitized one takes more (see `instrument`)."""
    types = [_TYPES[argument.kind] for argument in definition.args]
    if sanitizer:
        types += [None, "int32", *(["uint64"] * types.count(None))]
    return types


def _checked_definition(variant: Variant) -> KernelDefinition:
    definition = catalog.get(variant.definition)
    given = tuple(name for name, _ in variant.params)
    if given != definition.params:
        raise CompileSetupError(
            f"{variant.label()} gives the parameters {given}, its kernel has {definition.params}",
            kernel=variant.label(),
        )
    return definition


def _source(definition: KernelDefinition, variant: Variant, sanitizer: str) -> tuple[str, str]:
    """The kernel's text and the options that specialise it; a sanitized text is specialised."""
    sizes = (*variant.local_size, 1, 1)[: len(_LOCAL_SIZE_NAMES)]
    local = {name: str(size) for name, size in zip(_LOCAL_SIZE_NAMES, sizes, strict=True)}
    params = {name: str(value) for name, value in variant.params}
    defines = {f"ENTRY_{definition.entry_point}": "1", **params, **local}
    text = catalog.source_text(definition)
    if not sanitizer:
        return text, " ".join(f"-D{name}={value}" for name, value in defines.items())
    checks = ("access", "value") if sanitizer == "all" else (sanitizer,)
    return instrument(text, defines, definition.entry_point, checks), ""


def _compile(device: Device, variant: Variant, source: str, options: str) -> cl._cl._Program:
    module = opencl()
    # The raw program: pyopencl's wrapper adds options from the environment that no key names.
    program: cl._cl._Program = module._cl._Program(device.context, source)
    try:
        program._build(options.encode(), [device.handle])
    except module.Error as error:
        log = _log(program, device)
        raise CompileRejectedError(
            f"the compiler refused {variant.label()}: {_first_error(log) or error}",
            kernel=variant.label(),
            log=log,
        ) from error
    return program


def _kernel(program: cl._cl._Program, variant: Variant, entry_point: str) -> cl.Kernel:
    module = opencl()
    try:
        kernel: cl.Kernel = module.Kernel(program, entry_point)
    except module.Error as error:
        raise CompileRejectedError(
            f"{variant.label()} has no kernel {entry_point!r}: {error}", kernel=variant.label()
        ) from error
    return kernel


def _binary(program: cl._cl._Program) -> bytes:
    binaries: list[bytes] = program.get_info(opencl().program_info.BINARIES)
    return binaries[0]


def _log(program: cl._cl._Program, device: Device) -> str:
    log = program.get_build_info(device.handle, opencl().program_build_info.LOG)
    return str(log).strip("\0 \n")


# What Intel's compiler says of every kernel, however good.
_CHATTER = re.compile(
    r"(Compilation|Linking|Device build) (started|done)|Options used by backend compiler"
    r'|remark: |Kernel "?<?\w+"?>? was |Done\.'
)


def _without_chatter(log: str) -> str:
    """The lines of a good compile's log that say something."""
    return "\n".join(line for line in log.splitlines() if not _CHATTER.match(line)).strip()


def _first_error(log: str) -> str:
    return next((line.strip() for line in log.splitlines() if "error" in line), "")


def dry_launch(device: Device, variant: Variant, kernel: cl.Kernel, sanitizer: str = "") -> None:
    """Launch one work-group that touches nothing, as all its bounds are zero; wait for it.

    PoCL compiles a kernel for a local size at its first launch, and a binary that is read before
    makes every later process pay for that. What the device's queue holds is not waited for.
    DeviceError when the launch fails.
    """
    module, types = opencl(), _types(catalog.get(variant.definition), sanitizer)
    nbytes = 2 * ZONE_BYTES if sanitizer else _DUMMY_BYTES
    dummy = module.Buffer(device.context, module.mem_flags.READ_WRITE, nbytes)
    kernel.set_arg_types(types)
    kernel.set_args(*(dummy if kind is None else 0 for kind in types))
    local = variant.local_size
    try:
        module.enqueue_nd_range_kernel(device.side_queue, kernel, local, local)
        device.side_queue.finish()
    except module.Error as error:
        doing = f"{kernel.function_name} was launched for the first time"
        raise device_error(error, doing) from error
