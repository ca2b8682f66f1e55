// A generator of random numbers for each device. Its numbers are those of a generator of the CPU with the same seed.
#pragma once

#include "capturing.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>

#include <vector>

namespace simulated {

class DeviceGenerator final : public c10::GeneratorImpl {
 public:
  DeviceGenerator(DeviceIndex device, at::Generator drawing)
      : GeneratorImpl(Device(c10::kCUDA, device), c10::DispatchKeySet(c10::DispatchKey::CUDA)),
        host_generator(std::move(drawing)) {}

  // The generator of the CPU that draws the numbers.
  at::Generator host_generator;

  static c10::DeviceType device_type() {
    return c10::kCUDA;
  }

  void set_current_seed(uint64_t seed) override {
    refuse_while_capturing(device().index(), "set_current_seed of a generator");
    host_generator.set_current_seed(seed);
  }

  uint64_t current_seed() const override {
    refuse_while_capturing(device().index(), "current_seed of a generator");
    return host_generator.current_seed();
  }

  uint64_t seed() override {
    refuse_while_capturing(device().index(), "seed of a generator");
    return host_generator.seed();
  }

  void set_offset(uint64_t /*offset*/) override {}

  uint64_t get_offset() const override {
    return 0;
  }

  void set_state(const c10::TensorImpl& state) override {
    refuse_while_capturing(device().index(), "set_state of a generator");
    host_generator.unsafeGetGeneratorImpl()->set_state(state);
  }

  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    refuse_while_capturing(device().index(), "get_state of a generator");
    return host_generator.unsafeGetGeneratorImpl()->get_state();
  }

 private:
  GeneratorImpl* clone_impl() const override {
    return new DeviceGenerator(device().index(), host_generator.clone());
  }
};

inline at::Generator new_generator(DeviceIndex device) {
  const DeviceIndex index = device < 0 ? current_device : device;
  auto host_generator = at::detail::createCPUGenerator(c10::default_rng_seed_val);
  return at::make_generator<DeviceGenerator>(index, std::move(host_generator));
}

inline const at::Generator& default_generator(DeviceIndex device) {
  static const std::vector<at::Generator> generators = [] {
    std::vector<at::Generator> of_devices;
    for (int index = 0; index < device_count(); index++) {
      of_devices.push_back(new_generator(static_cast<DeviceIndex>(index)));
    }
    return of_devices;
  }();
  return generators.at(device < 0 ? current_device : device);
}

// The generator of the CPU from which a generator of a device draws.
inline at::Generator host_generator_of(const at::Generator& generator) {
  return static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl())->host_generator;
}

}  // namespace simulated
