// A simulated CUDA for builds of torch without it: the arithmetic of the CPU on several devices, which refuse tensors
// of each other, have a limited memory and generators of their own, and do not wait for the host.
//
// One file is compiled: each of several would read torch's headers anew, which takes most of the time.
#include "operators/exchanges.h"
#include "operators/fallback.h"
#include "operators/graphs.h"
#include "operators/list_operators.h"
#include "operators/own_kernels.h"
#include "operators/storage_operators.h"
#include "runtime/hooks.h"

#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace simulated;

  // Devices.
  module.def("device_count", &device_count);
  module.def("current_device", [] { return static_cast<int>(current_device); });
  module.def("exchange_device", [](int device) { return static_cast<int>(exchange_current_device(device)); });
  module.def("default_generator", [](int device) { return default_generator(device); });
  module.def("launches", [](int device) { return launches[device].load(); });
  module.def("record_launches", [](bool recorded) { launches_are_recorded = recorded; });
  module.def("take_launches", &take_launches);

  // Streams.
  module.def("set_stream", [](int64_t stream, int device) { current_stream[device] = stream; });
  module.def("last_writer", [](const Tensor& tensor) {
    const Uses* uses = uses_of(tensor);
    TORCH_CHECK(uses != nullptr && uses->last_write.has_value(), "nobody has written to this tensor");
    return uses->last_write->stream.number;
  });
  module.def("is_behind", [](int device, int64_t stream, int64_t other) {
    const auto index = static_cast<DeviceIndex>(device);
    return is_behind({index, stream}, {index, other});
  });

  // Graphs.
  py::class_<Graph, std::shared_ptr<Graph>>(module, "Graph")
      .def("size", &Graph::size)
      .def("replay", &Graph::replay, py::call_guard<py::gil_scoped_release>());
  module.def("begin_capture", &begin_capture);
  module.def("end_capture", &end_capture);
  module.def("is_capturing", [] { return is_capturing(current_device); });

  // Waiting.
  module.def("synchronize", [](int device) {
    py::gil_scoped_release other_threads;
    wait_for_device(static_cast<DeviceIndex>(device), "torch.cuda.synchronize");
  });
  module.def("refuse_waiting", [](bool refused) { waiting_is_refused = refused; });
  module.def("warn_of_waiting", [](bool warned) { waiting_is_warned_of = warned; });
  module.def("is_waiting_warned_of", [] { return waiting_is_warned_of.load(); });
  module.def("is_waiting_refused", [] { return waiting_is_refused.load(); });
  module.def("waits", [] { return wait_count.load(); });
  module.def("take_reasons", [] {
    std::lock_guard<std::mutex> lock(late_copies_mutex);
    return std::exchange(reasons, {});
  });

  // Memory.
  module.def("set_limit", [](int device, int64_t bytes) { limit_bytes[device] = bytes; });
  module.def("total_bytes", [](int device) { return total_bytes(static_cast<DeviceIndex>(device)); });
  module.def("allocated_bytes", [](int device) { return allocated_bytes[device].load(); });
  module.def("peak_bytes", [](int device) { return peak_bytes[device].load(); });
  module.def("allocation_count", [](int device) { return allocation_count[device].load(); });
  module.def("reset_peak", [](int device) { peak_bytes[device] = allocated_bytes[device].load(); });
}
