// Python objects for the parts of a decoding step; they hold the arguments that are equal in every call.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "bindings/arrays.h"
#include "bindings/gil.h"
#include "kernels/decode/decode.h"
#include "kernels/decode/hyper_connection.h"
#include "kernels/decode/latent.h"

namespace moechat {

using Address = std::uint64_t;

template <class T = void>
T* at(Address address) {
  return reinterpret_cast<T*>(static_cast<std::uintptr_t>(address));
}

inline ElementType element_type(const std::string& name) {
  if (name == "float32") return ElementType::kFloat32;
  if (name == "bfloat16") return ElementType::kBfloat16;
  if (name == "float16") return ElementType::kFloat16;
  refuse("element type is '" + name + "'; it must be float32, bfloat16 or float16");
}

inline void require_positive(const char* name, std::int64_t value) {
  if (value < 1) refuse(std::string(name) + " is " + std::to_string(value) + "; it must be at least 1");
}

struct Norm {
  NormTask task;

  void run(Address x, Address out, std::int64_t rows) const {
    NormTask own = task;
    own.x = at(x);
    own.out = at(out);
    const ReleaseGil released;
    rms_norm(own, rows);
  }
};

struct Delta {
  DeltaTask task;

  void run(Address mixed, Address gate, Address beta, Address decay, Address before, Address state,
           Address out) const {
    DeltaTask own = task;
    own.mixed = at(mixed);
    own.gate_row = at(gate);
    own.beta_row = at(beta);
    own.decay_row = at(decay);
    own.before = at(before);
    own.state = at<float>(state);
    own.out = at(out);
    const ReleaseGil released;
    delta(own);
  }

  // cols: of the four rows, elements from those of a token to the next.
  void many(std::int64_t tokens, const std::array<Address, 4>& rows, const std::array<std::int64_t, 4>& cols,
            Address before, Address state, Address out) const {
    require_positive("tokens", tokens);
    DeltaTask own = task;
    own.tokens = tokens;
    own.mixed = at(rows[0]);
    own.gate_row = at(rows[1]);
    own.beta_row = at(rows[2]);
    own.decay_row = at(rows[3]);
    own.mixed_cols = cols[0];
    own.gate_cols = cols[1];
    own.beta_cols = cols[2];
    own.decay_cols = cols[3];
    own.before = at(before);
    own.state = at<float>(state);
    own.out = at(out);
    const ReleaseGil released;
    delta(own);
  }
};

struct Attention {
  AttendTask task;

  // Returns whether attend_prompt() supports the call; without `prompt` true.
  bool run(Address query, std::int64_t query_head, std::int64_t query_token, std::int64_t tokens, Address key,
           std::int64_t key_head, std::int64_t key_token, Address tail, std::int64_t tail_token,
           Address value, std::int64_t value_head, std::int64_t value_token, std::int64_t context,
           Address visible, std::int64_t visible_token, Address out, bool prompt) const {
    require_positive("tokens", tokens);
    require_positive("context", context);
    if (prompt && context < tokens) refuse("there are fewer keys than tokens");
    AttendTask own = task;
    own.query = at(query);
    own.query_head = query_head;
    own.query_token = query_token;
    own.tokens = tokens;
    own.key = at(key);
    own.key_head = key_head;
    own.key_token = key_token;
    own.tail = at(tail);
    own.tail_head = 0;
    own.tail_token = tail_token;
    own.value = at(value);
    own.value_head = value_head;
    own.value_token = value_token;
    own.context = context;
    own.visible = at<const unsigned char>(visible);
    own.visible_token = visible_token;
    own.out = at(out);
    const ReleaseGil released;
    if (prompt) return attend_prompt(own);
    attend(own);
    return true;
  }
};

struct LatentHeads {
  LatentAttention task;
  py::object kept = py::none();  // the array of packed weights

  void run(Address query, std::int64_t query_head, Address latents, std::int64_t latent_token, Address turned,
           std::int64_t turned_token, std::int64_t context, Address out) const {
    require_positive("context", context);
    const ReleaseGil released;
    attend_latents(
        task, {at(query), query_head, at(latents), latent_token, at(turned), turned_token, context, at(out)});
  }
};

struct Mixing {
  HyperConnection task;

  void run(Address x, Address post, Address comb, Address collapsed) const {
    const ReleaseGil released;
    hyper_connection(task, at(x), at<float>(post), at<float>(comb), at(collapsed));
  }
};

struct RouterStep {
  RouteTask task;
  RouterRule rule;
  std::optional<RouterScales> scales;

  RouterStep scaled(const Norm& norm, Address inputs, float input, Address expert_factors) const {
    if (norm.task.type != task.type || norm.task.cols != task.hidden)
      refuse("the norm has another width or type");
    if (rule.weight_type != ElementType::kFloat32) refuse("scaled weights must be float32");
    RouterStep made = *this;
    made.scales = RouterScales{norm.task, at(inputs), input, at<const float>(expert_factors)};
    return made;
  }

  void run(Address x, std::int64_t tokens, Address logits, Address index, Address weights) const {
    RouteTask own = task;
    own.x = at(x);
    own.tokens = tokens;
    own.logits = at(logits);
    const ReleaseGil released;
    if (scales) return route_scaled(own, rule, *scales, at<std::int64_t>(index), at<float>(weights));
    route(own, rule, at<std::int64_t>(index), at(weights));
  }
};

}  // namespace moechat
