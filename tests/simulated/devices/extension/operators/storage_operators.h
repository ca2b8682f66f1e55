// Operations that allocate, resize or copy memory of a device.
#pragma once

#include "../runtime/launches.h"
#include "../runtime/streams.h"
#include "graphs.h"
#include "host_tensors.h"
#include "stream_order.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

namespace simulated {

using at::IntArrayRef;
using at::ScalarType;
using std::optional;

// Allocation.

inline void enter_device(c10::OptionalDeviceGuard& guard, optional<Device> device) {
  if (device.has_value() && device->has_index()) {
    guard.reset_device(*device);
  }
}

inline Tensor empty(
    IntArrayRef size, optional<ScalarType> dtype, optional<at::Layout>, optional<Device> device, optional<bool>,
    optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard;
  enter_device(guard, device);
  return at::detail::empty_generic(size, &device_allocator, kDeviceKeys, at::dtype_or_default(dtype), format);
}

inline Tensor empty_strided(
    IntArrayRef size, IntArrayRef stride, optional<ScalarType> dtype, optional<at::Layout>, optional<Device> device,
    optional<bool>) {
  c10::OptionalDeviceGuard guard;
  enter_device(guard, device);
  return at::detail::empty_strided_generic(
      size, stride, &device_allocator, kDeviceKeys, at::dtype_or_default(dtype));
}

inline const Tensor& resize_(const Tensor& self, IntArrayRef size, optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  auto* storage = self.storage().unsafeGetStorageImpl();
  const size_t element_count = impl->storage_offset() + c10::multiply_integers(size);
  if (storage->nbytes() > 0 && element_count * self.element_size() > storage->nbytes()) {
    refuse_while_capturing(self.device().index(), "resize_ of memory that is in use");
  }
  impl->set_sizes_contiguous(size);
  const size_t needed_bytes = element_count * self.element_size();
  if (needed_bytes <= storage->nbytes()) {
    return self;
  }
  c10::DeviceGuard guard(self.device());
  DataPtr data = device_allocator.allocate(needed_bytes);
  if (storage->nbytes() > 0) {
    std::memcpy(data.get(), storage->data(), storage->nbytes());
  }
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(needed_bytes);
  return self;
}

// Copies.

// Spoils what is read before the copy arrives.
inline void spoil(Tensor& destination, const Tensor& arriving) {
  if (at::isIntegralType(destination.scalar_type(), /*includeBool=*/true)) {
    destination.copy_(arriving.to(destination.scalar_type()).bitwise_not());
  } else {
    destination.fill_(std::numeric_limits<double>::quiet_NaN());
  }
}

inline void copy_later(Tensor destination, const Tensor& source, DeviceIndex device) {
  // The values of now: the device works in order.
  const Tensor arriving = source.clone();
  spoil(destination, arriving);
  start_late_copy(device, current_stream[device], [destination, arriving]() mutable {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    destination.copy_(arriving);
  });
}

inline Tensor host_side(const Tensor& tensor) {
  return tensor.is_cuda() ? host_twin(tensor) : tensor.detach();
}

// A copy within a device, or from pinned memory, which each replay does again.
inline void capture_copy(const Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.is_cpu()) {
    break_capture("copy to the CPU");
  }
  if (source.is_cpu() && !(non_blocking && is_pinned(source.storage().data()))) {
    break_capture("copy from the CPU");
  }
  for (const Tensor& tensor : {self, source}) {
    if (tensor.is_cuda()) {
      if (tensor.device().index() != captured_stream.device) {
        break_capture("copy between devices");
      }
      captured_graph->note(tensor);
    }
  }
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Tensor destination = host_side(self);
  const Tensor values = host_side(source);
  destination.copy_(values);
  captured_graph->record([destination, values] { destination.copy_(values); });
}

inline Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.is_same(source)) {
    return self;
  }
  const DeviceIndex device = (self.is_cuda() ? self : source).device().index();
  if (is_capturing(device) || (source.is_cuda() && is_capturing(source.device().index()))) {
    capture_copy(self, source, non_blocking);
    return self;
  }
  count_launch(device, "aten::copy_");
  note_copy(self, source);
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  Tensor destination = host_side(self);
  const Tensor values = host_side(source);
  if (self.is_cpu()) {
    if (non_blocking && is_pinned(self.storage().data())) {
      copy_later(destination, values, device);
      return self;
    }
    wait_for_stream(device, current_stream[device], "copy to the CPU");
  } else if (source.is_cpu() && !(non_blocking && is_pinned(source.storage().data()))) {
    wait_for_stream(device, current_stream[device], "copy from the CPU");
  }
  destination.copy_(values);
  return self;
}

// Exchange of storages.

inline Tensor& set_storage_and_shape(
    Tensor& self, c10::Storage storage, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  if (stride.empty() && !size.empty()) {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride, offset);
  }
  return self;
}

inline Tensor& set_storage(Tensor& self, c10::Storage storage) {
  const auto element_count = static_cast<int64_t>(storage.nbytes() / self.element_size());
  return set_storage_and_shape(self, std::move(storage), 0, {element_count}, {1});
}

inline Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage_and_shape(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

inline Tensor& set_nothing(Tensor& self) {
  DataPtr nothing(nullptr, self.device());
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, std::move(nothing), &device_allocator, true);
  return set_storage_and_shape(self, std::move(storage), 0, {0}, {1});
}

inline void record_stream(Tensor& self, Stream stream) {
  DeviceGuard().recordDataPtrOnStream(self.storage().data_ptr(), stream);
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("resize_", resize_);
  library.impl("copy_", copy_);
  library.impl("set_.source_Storage_storage_offset", set_storage_and_shape);
  library.impl("set_.source_Storage", set_storage);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("set_", set_nothing);
  library.impl("record_stream", record_stream);
}

}  // namespace simulated
