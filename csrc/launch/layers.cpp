// layers.cpp: many launches by one call, so that a step of hundreds costs the caller's language nothing; order between
// streams.
#include "error.h"

extern "C" int rorqual_run_layers(const RorqualRunLayers* a, void*) {
  RORQUAL_REQUIRE(a->num_launches >= 0 && a->num_own_pointers >= 0 && a->num_layers >= 0 && a->num_pointers >= 0,
                  "run_layers: numbers must be >= 0");
  RORQUAL_REQUIRE((a->num_launches == 0 || a->launches) &&
                      (a->num_own_pointers == 0 || (a->own_pointers && a->pointers)),
                  "run_layers: launches, own_pointers and pointers must not be NULL");
  for (int layer = 0; layer < a->num_layers; ++layer) {
    void* const* pointers = a->pointers + int64_t{layer} * a->num_pointers;
    for (int i = 0; i < a->num_own_pointers; ++i) {
      *a->own_pointers[i].field = pointers[a->own_pointers[i].pointer];
    }
    for (int i = 0; i < a->num_launches; ++i) {
      const int code = a->launches[i].function(a->launches[i].args, a->launches[i].stream);
      if (code != 0) return code;
    }
  }
  return 0;
}

extern "C" int rorqual_stream_wait(const RorqualStreamWait* a, void* stream) {
  RORQUAL_REQUIRE(a->event, "stream_wait: event must not be NULL");
  const auto event = static_cast<cudaEvent_t>(a->event);
  cudaError_t error = cudaEventRecord(event, static_cast<cudaStream_t>(stream));
  if (error == cudaSuccess) error = cudaStreamWaitEvent(static_cast<cudaStream_t>(a->other), event, 0);
  return rorqual::from_cuda(error, "stream_wait");
}
