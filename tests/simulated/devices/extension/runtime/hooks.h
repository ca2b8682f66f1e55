// The answers that torch asks of a CUDA library when it has loaded one.
#pragma once

#include "generators.h"
#include "memory.h"
#include "streams.h"

#include <ATen/detail/CUDAHooksInterface.h>

namespace simulated {

struct Hooks final : public at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}

  void init() const override {}

  bool isBuilt() const override {
    return true;
  }

  bool isAvailable() const override {
    return true;
  }

  bool hasCUDA() const override {
    return true;
  }

  bool hasPrimaryContext(DeviceIndex) const override {
    return true;
  }

  // Devices.

  DeviceIndex deviceCount() const override {
    return static_cast<DeviceIndex>(device_count());
  }

  int getNumGPUs() const override {
    return device_count();
  }

  DeviceIndex current_device() const override {
    return simulated::current_device;
  }

  DeviceIndex getCurrentDevice() const override {
    return simulated::current_device;
  }

  void setCurrentDevice(DeviceIndex device) const override {
    exchange_current_device(device);
  }

  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return exchange_current_device(device);
  }

  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return exchange_current_device(device);
  }

  void deviceSynchronize(DeviceIndex device) const override {
    wait_for_device(device, "synchronize");
  }

  // Generators.

  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    return default_generator(device);
  }

  at::Generator getNewGenerator(DeviceIndex device) const override {
    return new_generator(device);
  }

  // Memory.

  bool isPinnedPtr(const void* address) const override {
    return is_pinned(address);
  }

  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_allocator;
  }

  c10::Allocator* getCUDADeviceAllocator() const override {
    return &device_allocator;
  }

  Device getDeviceFromPtr(void* /*address*/) const override {
    return Device(c10::kCUDA, simulated::current_device);
  }
};

}  // namespace simulated

namespace at {

// The macro makes a name of the class's, so it stands without its namespace.
using SimulatedHooks = simulated::Hooks;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, SimulatedHooks)

}  // namespace at
