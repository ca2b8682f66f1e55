// Operations that the fallback must know by name.
#pragma once

#include <set>
#include <string>

namespace simulated {

inline bool contains(const std::set<std::string>& names, const std::string& name) {
  return names.count(name) > 0;
}

inline bool begins_with(const std::string& name, const std::string& beginning) {
  return name.rfind(beginning, 0) == 0;
}

// The host waits for their results: it needs a value, or the number of values.
inline bool makes_host_wait(const std::string& name) {
  static const std::set<std::string> names = {
      "aten::_local_scalar_dense", "aten::_unique2", "aten::bincount", "aten::equal",
      "aten::masked_select", "aten::nonzero", "aten::unique_consecutive",
      "aten::unique_dim",
  };
  return contains(names, name);
}

// Their indices may lie on the CPU.
inline bool takes_host_indices(const std::string& name) {
  static const std::set<std::string> names = {
      "aten::_index_put_impl_", "aten::_unsafe_index", "aten::_unsafe_index_put",
      "aten::index", "aten::index_put", "aten::index_put_",
  };
  return contains(names, name);
}

// They take lists of tensors, of which each position may lie on another device.
inline bool takes_columns(const std::string& name) {
  return begins_with(name, "aten::_foreach_") || begins_with(name, "aten::_fused_");
}

// They only make a view, so no kernel is launched.
inline bool makes_view(const std::string& name) {
  static const std::set<std::string> names = {
      "aten::_reshape_alias", "aten::_unsafe_view", "aten::alias", "aten::as_strided", "aten::detach",
      "aten::diagonal", "aten::expand", "aten::imag", "aten::permute", "aten::real",
      "aten::select", "aten::slice", "aten::split", "aten::squeeze", "aten::t",
      "aten::transpose", "aten::unbind", "aten::unfold", "aten::unsqueeze", "aten::view",
      "aten::view_as_complex", "aten::view_as_real",
  };
  return contains(names, name);
}

}  // namespace simulated
