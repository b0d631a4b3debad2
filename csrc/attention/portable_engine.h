// SPDX-License-Identifier: Apache-2.0
// Attention's arithmetic in plain C++: the reference that every CPU can run. Keys of a panel are [head_size, 16] and
// values [16, head_size], so that the compiler can work on several at a time; queries, logits, weights and outputs are
// fp32, row by row.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "attention/dispatch.h"
#include "attention/item_runner.h"

namespace vllm_arm {
namespace {

template <typename ElementType, typename Stored>
struct PortableEngine {
  using Element = ElementType;

  static std::int64_t group_rows(std::int64_t) { return kMaximumGroupRows; }

  static void pack_query(char* destination, const char* const* sources, std::int64_t rows, std::int64_t head_size) {
    auto* query = reinterpret_cast<float*>(destination);
    for (std::int64_t row = 0; row < rows; ++row) {
      const auto* source = reinterpret_cast<const Element*>(sources[row]);
      for (std::int64_t i = 0; i < head_size; ++i) query[row * head_size + i] = to_float(source[i]);
    }
  }

  static float& logit(float* logits, std::int64_t row, std::int64_t key, std::int64_t panels) {
    return logits[row * panels * kPanelTokens + key];
  }

  static void scores(float* logits, float* largest, const char* packed_query, std::int64_t rows, const Panels& panels,
                     const KvCache& cache) {
    const auto* query = reinterpret_cast<const float*>(packed_query);
    const std::int64_t head_size = cache.head_size;
    for (std::int64_t panel = 0; panel < panels.count; ++panel) {
      const auto* stored = reinterpret_cast<const Stored*>(panels.keys[panel]);
      for (std::int64_t row = 0; row < rows; ++row) {
        float sums[kPanelTokens] = {};
        for (std::int64_t i = 0; i < head_size; ++i) {
          const float factor = query[row * head_size + i];
          for (std::int64_t key = 0; key < kPanelTokens; ++key) {
            sums[key] += factor * to_float(stored[i * kPanelTokens + key]);
          }
        }
        for (std::int64_t key = 0; key < kPanelTokens; ++key) {
          const std::int64_t index = panel * kPanelTokens + key;
          const float scale = std::is_same_v<Stored, Int8> ? panels.key_scales[index] : cache.key_scale;
          logit(logits, row, index, panels.count) = sums[key] * scale;
        }
      }
    }
    maxima(largest, logits, rows, panels.count);
  }

  static void transform(float* logits, std::int64_t rows, std::int64_t panels, float scale, float softcap) {
    for (std::int64_t i = 0; i < rows * panels * kPanelTokens; ++i) {
      logits[i] = softcap == 0 ? logits[i] * scale : softcap * std::tanh(logits[i] * (scale / softcap));
    }
  }

  static void maxima(float* largest, const float* logits, std::int64_t rows, std::int64_t panels) {
    const std::int64_t keys = panels * kPanelTokens;
    for (std::int64_t row = 0; row < rows; ++row) {
      float maximum = -kInfinity;
      for (std::int64_t key = 0; key < keys; ++key) {
        const float value = logits[row * keys + key];
        if (value > maximum || value != value) maximum = value;
      }
      largest[row] = maximum;
    }
  }

  static void exp2(float (&values)[kMaximumGroupRows]) {
    for (float& value : values) value = std::exp2(value);
  }

  static void weights(char* destination, float* sums, const float* logits, std::int64_t rows, const Panels& panels,
                      float scale, const float* subtracted) {
    auto* result = reinterpret_cast<float*>(destination);
    const std::int64_t keys = panels.count * kPanelTokens;
    for (std::int64_t row = 0; row < rows; ++row) {
      float sum = 0;
      for (std::int64_t key = 0; key < keys; ++key) {
        const float weight = std::exp2(logits[row * keys + key] * scale - subtracted[row]);
        sum += weight;
        result[row * keys + key] = std::is_same_v<Stored, Int8> ? weight * panels.value_scales[key] : weight;
      }
      sums[row] = sum;
    }
  }

  static void accumulate(float* outputs, const char* packed_weights, std::int64_t rows, const Panels& panels,
                         const KvCache& cache, Accumulate mode, const float* factors) {
    const auto* weights = reinterpret_cast<const float*>(packed_weights);
    const std::int64_t head_size = cache.head_size, keys = panels.count * kPanelTokens;
    for (std::int64_t row = 0; row < rows; ++row) {
      float* output = outputs + row * head_size;
      const float factor = mode == Accumulate::rescale ? factors[row] : 1;
      for (std::int64_t i = 0; i < head_size; ++i) output[i] = mode == Accumulate::first ? 0 : output[i] * factor;
      for (std::int64_t key = 0; key < keys; ++key) {
        const auto* stored =
            reinterpret_cast<const Stored*>(panels.values[key / kPanelTokens]) + key % kPanelTokens * head_size;
        const float scale = std::is_same_v<Stored, Int8> ? 1 : cache.value_scale;
        const float weight = weights[row * keys + key] * scale;
        for (std::int64_t i = 0; i < head_size; ++i) output[i] += weight * to_float(stored[i]);
      }
    }
  }

  static void copy_values(char* destination, const char* panel, std::int64_t valid, std::int64_t head_size) {
    std::memcpy(destination, panel, valid * head_size * sizeof(Stored));
    std::memset(destination + valid * head_size * sizeof(Stored), 0,
                (kPanelTokens - valid) * head_size * sizeof(Stored));
  }

  template <typename Destination>
  static void write_row(Destination* destination, const float* outputs, std::int64_t row, std::int64_t head_size,
                        float factor) {
    for (std::int64_t i = 0; i < head_size; ++i) from_float(outputs[row * head_size + i] * factor, destination[i]);
  }

  // Stores a token of a panel.
  static void write_key(Stored* panel, std::int64_t token, const Element* key, std::int64_t head_size, float inverse) {
    for (std::int64_t i = 0; i < head_size; ++i) store(key[i], inverse, panel[i * kPanelTokens + token]);
  }
  static void write_value(Stored* panel, std::int64_t token, const Element* value, std::int64_t head_size,
                          float inverse) {
    for (std::int64_t i = 0; i < head_size; ++i) store(value[i], inverse, panel[token * head_size + i]);
  }

 private:
  static void store(Element element, float inverse, Stored& stored) {
    if constexpr (std::is_same_v<Stored, Element>) {
      stored = element;
    } else if constexpr (std::is_same_v<Stored, Int8>) {
      stored.value =
          inverse == 0 ? std::int8_t{0} : static_cast<std::int8_t>(std::nearbyint(to_float(element) * inverse));
    } else {
      from_float(to_float(element) * inverse, stored);
    }
  }
};

}  // namespace
}  // namespace vllm_arm
