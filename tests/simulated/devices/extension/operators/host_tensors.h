// Tensors of the CPU that share the memory of tensors of a device, and the other way round.
#pragma once

#include "../runtime/memory.h"

#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>

namespace simulated {

using at::Tensor;

constexpr c10::DispatchKeySet kHostKeys{c10::DispatchKey::CPU};
constexpr c10::DispatchKeySet kDeviceKeys{c10::DispatchKey::CUDA};

// A tensor over a storage, with the shape and dtype of another.
inline Tensor tensor_over(c10::Storage storage, c10::DispatchKeySet keys, const Tensor& like) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, like.dtype());
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) {
    impl->set_wrapped_number(true);
  }
  return tensor;
}

// The same memory as a tensor of the CPU. It does not keep the memory alive.
inline Tensor host_twin(const Tensor& tensor) {
  const auto& storage = tensor.storage();
  DataPtr borrowed(storage.mutable_data(), nullptr, [](void*) {}, c10::kCPU);
  c10::Storage host_storage(
      c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(borrowed), c10::GetCPUAllocator(), true);
  return tensor_over(std::move(host_storage), kHostKeys, tensor);
}

// A tensor of a device in the memory of a tensor of the CPU, which nobody else uses.
inline Tensor device_tensor(const Tensor& host_tensor, DeviceIndex device) {
  const auto& host_storage = host_tensor.storage();
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), host_storage.nbytes(), memory_around(host_storage, device), &device_allocator,
      true);
  return tensor_over(std::move(storage), kDeviceKeys, host_tensor);
}

// Another view of the storage of a tensor of a device.
inline Tensor device_view(const Tensor& base, const Tensor& like) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), like.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return view;
}

inline bool is_same(const Tensor& one, const Tensor& other) {
  return one.unsafeGetTensorImpl() == other.unsafeGetTensorImpl();
}

inline bool shares_storage(const Tensor& one, const Tensor& other) {
  return one.storage().unsafeGetStorageImpl() == other.storage().unsafeGetStorageImpl();
}

}  // namespace simulated
