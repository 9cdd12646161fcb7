// The streams of weights that the neurons of a block are computed from, two at a time. Included inside the
// anonymous namespace of one instruction set.

// Where stream 0 or 1 of the neurons of a block is read from `tile` on: gate and up of this tile or, if not
// gated, gate of this tile and of the next one; the last before `end` is computed twice if it is alone.
struct NeuronStream {
  std::int64_t q;
  std::int64_t sz;
  std::int64_t super;
  std::int64_t tile;
};

MOECHAT_INLINE NeuronStream neuron_stream(const BlockLayout& layout, int stream, std::int64_t tile,
                                          std::int64_t end) {
  if (stream == 1 && layout.gated) return {layout.up_q, layout.up_sz, layout.up_super, tile};
  return {layout.gate_q, layout.gate_sz, layout.gate_super, stream == 1 && tile + 1 < end ? tile + 1 : tile};
}

// Tiles of neurons that two streams complete.
MOECHAT_INLINE int tiles_a_step(const BlockLayout& layout) { return layout.gated ? 1 : 2; }
