// A backend for torch's PrivateUse1 device type: tensors in host memory, and each operator by way of the CPU's.
// For tests of a device type that the library has no kernels for.
#include <ATen/core/Tensor.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>

namespace {

constexpr auto KIND = c10::DeviceType::PrivateUse1;

struct Memory final : c10::Allocator {
    c10::DataPtr allocate(size_t bytes) override {
        void* p = bytes ? c10::alloc_cpu(bytes) : nullptr;
        return {p, p, &c10::free_cpu, c10::Device(KIND, 0)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &c10::free_cpu; }
    void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
} memory;
REGISTER_ALLOCATOR(KIND, &memory)
C10_REGISTER_GUARD_IMPL(PrivateUse1, c10::impl::NoOpDeviceGuardImpl<KIND>)

struct Hooks final : at::PrivateUse1HooksInterface {
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
};
const bool hooks = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
    return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &memory,
                                     c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype),
                                     format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
    return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory,
                                             c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                             c10::dtype_or_default(dtype));
}

at::Tensor on_cpu(const at::Tensor& t) {
    return at::from_blob(t.data_ptr(), t.sizes(), t.strides(), t.options().device(c10::kCPU));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
    if (to.numel()) on_cpu(to).copy_(on_cpu(from));
    return to;
}

const at::Tensor& resize(const at::Tensor& t, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
    auto sizes = C10_AS_INTARRAYREF_SLOW(size);
    if (t.sizes() == sizes) return t;
    auto fresh = at::empty(sizes, t.options());
    auto kept = std::min(t.numel(), fresh.numel());
    if (kept) on_cpu(fresh).flatten().slice(0, 0, kept).copy_(on_cpu(t).flatten().slice(0, 0, kept));
    auto* impl = t.unsafeGetTensorImpl();
    impl->set_storage_keep_dtype(fresh.storage());
    impl->set_storage_offset(0);
    impl->set_sizes_contiguous(sizes);
    return t;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
    resize(to, c10::fromIntArrayRefSlow(from.sizes()), std::nullopt);
    return copy_from(from, to, false);
}

at::Tensor& set(at::Tensor& t, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
                c10::SymIntArrayRef stride) {
    return at::cpu::set__symint(t, storage, offset, size, stride);
}

at::Tensor& set_whole(at::Tensor& t, at::Storage storage) {
    auto count = static_cast<int64_t>(storage.nbytes() / t.dtype().itemsize());
    return at::cpu::set_(t, storage, 0, {count}, {});
}

void by_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    m.impl("empty.memory_format", empty);
    m.impl("empty_strided", empty_strided);
    m.impl("_copy_from", copy_from);
    m.impl("_copy_from_and_resize", copy_from_and_resize);
    m.impl("resize_", resize);
    m.impl("as_strided", at::native::as_strided_tensorimpl);
    m.impl("view", at::native::view);
    m.impl("_reshape_alias", at::native::_reshape_alias);
    m.impl("set_.source_Storage", set_whole);
    m.impl("set_.source_Storage_storage_offset", set);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&by_cpu>()); }
