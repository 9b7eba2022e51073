// Triton's custom batching: looks at each request before it joins a batch, and takes the malformed text out of it.
//
// Triton's Python backend reads all requests of a batch into shared memory before the model sees one. An input of type
// BYTES with an element that is longer than what arrived ends that, and every request of the batch gets the error. Triton
// itself refuses elements that are too many or too few, but does not look whether the last one is whole. So this does:
// such an input gets empty texts in place of its own, and the request a parameter with the error, for which the model
// refuses it (llama_engine/triton/requests.py). Batches are formed as without: every request is included.
//
// Triton loads `batchstrategy.so` from a model's version folder and calls the five functions at the end from the thread
// that forms the model's batches, with the request's queue locked. Their signatures and the declarations below are from
// tritonserver.h and tritonbackend.h, whose API has had the major version 1 since 2020; no header is needed to compile.
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstring>

extern "C" {

struct TRITONSERVER_Error;
struct TRITONSERVER_InferenceRequest;
struct TRITONBACKEND_Batcher;
struct TRITONBACKEND_Input;
struct TRITONBACKEND_Model;
struct TRITONBACKEND_Request;

// Where tritonserver is not the program, its library's functions may be missing: then requests stay as they are.
#define TRITON __attribute__((weak)) TRITONSERVER_Error*
TRITON TRITONSERVER_InferenceRequestAppendInputData(
    TRITONSERVER_InferenceRequest*, const char* name, const void* data, size_t bytes, int memory, int64_t memory_id);
TRITON TRITONSERVER_InferenceRequestRemoveAllInputData(TRITONSERVER_InferenceRequest*, const char* name);
TRITON TRITONSERVER_InferenceRequestSetStringParameter(
    TRITONSERVER_InferenceRequest*, const char* key, const char* value);
TRITON TRITONBACKEND_ApiVersion(uint32_t* major, uint32_t* minor);
TRITON TRITONBACKEND_InputBuffer(
    TRITONBACKEND_Input*, uint32_t index, const void** data, uint64_t* bytes, int* memory, int64_t* memory_id);
TRITON TRITONBACKEND_InputProperties(
    TRITONBACKEND_Input*, const char** name, int* type, const int64_t** shape, uint32_t* dimensions, uint64_t* bytes,
    uint32_t* buffers);
TRITON TRITONBACKEND_RequestInputByIndex(TRITONBACKEND_Request*, uint32_t index, TRITONBACKEND_Input**);
TRITON TRITONBACKEND_RequestInputCount(TRITONBACKEND_Request*, uint32_t* count);
#undef TRITON
__attribute__((weak)) void TRITONSERVER_ErrorDelete(TRITONSERVER_Error*);
}

namespace {

constexpr int TYPE_BYTES = 13;    // TRITONSERVER_TYPE_BYTES
constexpr int MEMORY_CPU = 0;     // TRITONSERVER_MEMORY_CPU
constexpr int MEMORY_GPU = 2;     // TRITONSERVER_MEMORY_GPU
constexpr uint64_t LENGTH = 4;    // bytes of an element's length, which stands before it
constexpr char PARAMETER[] = "malformed_input";

// Lengths of empty elements. Triton refers to them, for as long as the request exists.
constexpr unsigned char EMPTY[4096] = {};

// Of this source: what is compiled from another one is compiled again.
__attribute__((used)) constexpr char COMPILED_FROM[] = SOURCE;

// Whether Triton has the functions above.
bool usable = false;

struct Input {
    TRITONBACKEND_Input* input;
    const char* name;
    const int64_t* shape;
    uint32_t dimensions, buffers;
    uint64_t bytes;

    // Returns 0 for a shape that Triton would have refused: its data has a length for each element.
    uint64_t elements() const {
        uint64_t count = 1;
        for (uint32_t i = 0; i < dimensions; i++) {
            if (shape[i] <= 0 || count > bytes / uint64_t(shape[i])) return 0;
            count *= uint64_t(shape[i]);
        }
        return count * LENGTH <= bytes ? count : 0;
    }
};

// The data of an input, which may lie in several buffers.
class Reader {
public:
    explicit Reader(const Input& input) : input_(input) {}

    // Moves on, and copies what it passes unless `to` is null. Returns whether there was as much, in this host's memory.
    bool read(uint64_t bytes, unsigned char* to) {
        while (bytes > 0) {
            while (left_ == 0)
                if (!next_buffer()) return false;
            const uint64_t part = bytes < left_ ? bytes : left_;
            if (to != nullptr) {
                memcpy(to, at_, part);
                to += part;
            }
            at_ += part;
            left_ -= part;
            bytes -= part;
        }
        return true;
    }

private:
    bool next_buffer() {
        const void* data = nullptr;
        int memory = MEMORY_CPU;
        int64_t memory_id = 0;
        if (index_ == input_.buffers) return false;
        if (auto* error = TRITONBACKEND_InputBuffer(input_.input, index_++, &data, &left_, &memory, &memory_id)) {
            TRITONSERVER_ErrorDelete(error);
            return false;
        }
        at_ = static_cast<const unsigned char*>(data);
        // Not readable here. Only clients with the control key can register shared memory.
        return memory != MEMORY_GPU;
    }

    const Input& input_;
    const unsigned char* at_ = nullptr;
    uint64_t left_ = 0;
    uint32_t index_ = 0;
};

// Writes the error in the form that the model reads.
void write(char* said, size_t room, const Input& input, const char* what, uint64_t bytes, uint64_t arrived) {
    snprintf(said, room, "%s has %s of %" PRIu64 " bytes, of which %" PRIu64 " arrived", input.name, what, bytes, arrived);
}

// Returns whether an element is longer than what arrived, and writes the error.
bool is_malformed(const Input& input, char* said, size_t room) {
    Reader reader(input);
    for (uint64_t left = input.bytes; left > 0;) {
        unsigned char digits[LENGTH];
        if (left < LENGTH) {
            write(said, room, input, "an element's length", LENGTH, left);
            return true;
        }
        if (!reader.read(LENGTH, digits)) return false;
        left -= LENGTH;
        const uint64_t length = uint64_t(digits[0]) | uint64_t(digits[1]) << 8 | uint64_t(digits[2]) << 16 |
                                uint64_t(digits[3]) << 24;
        if (length > left) {
            write(said, room, input, "an element", length, left);
            return true;
        }
        if (!reader.read(length, nullptr)) return false;
        left -= length;
    }
    return false;
}

// Puts empty texts in place of the input's.
TRITONSERVER_Error* empty(TRITONSERVER_InferenceRequest* request, const Input& input) {
    uint64_t bytes = input.elements() * LENGTH;
    if (auto* error = TRITONSERVER_InferenceRequestRemoveAllInputData(request, input.name)) return error;
    while (bytes > 0) {
        const uint64_t part = bytes < sizeof EMPTY ? bytes : sizeof EMPTY;
        if (auto* error =
                TRITONSERVER_InferenceRequestAppendInputData(request, input.name, EMPTY, part, MEMORY_CPU, 0))
            return error;
        bytes -= part;
    }
    return nullptr;
}

TRITONSERVER_Error* check(TRITONBACKEND_Request* request) {
    // Both are names of Triton's one class of requests.
    auto* writable = reinterpret_cast<TRITONSERVER_InferenceRequest*>(request);
    uint32_t count = 0;
    if (auto* error = TRITONBACKEND_RequestInputCount(request, &count)) return error;
    for (uint32_t index = 0; index < count; index++) {
        Input input{};
        int type = 0;
        if (auto* error = TRITONBACKEND_RequestInputByIndex(request, index, &input.input)) return error;
        if (auto* error = TRITONBACKEND_InputProperties(
                input.input, &input.name, &type, &input.shape, &input.dimensions, &input.bytes, &input.buffers))
            return error;
        char said[256];
        if (type != TYPE_BYTES || input.elements() == 0 || !is_malformed(input, said, sizeof said)) continue;
        if (auto* error = TRITONSERVER_InferenceRequestSetStringParameter(writable, PARAMETER, said)) return error;
        if (auto* error = empty(writable, input)) return error;
    }
    return nullptr;
}

}  // namespace

extern "C" {

TRITONSERVER_Error* TRITONBACKEND_ModelBatcherInitialize(TRITONBACKEND_Batcher** batcher, TRITONBACKEND_Model*) {
    *batcher = nullptr;
    uint32_t major = 0, minor = 0;
    usable = TRITONBACKEND_ApiVersion && TRITONBACKEND_InputBuffer && TRITONBACKEND_InputProperties &&
             TRITONBACKEND_RequestInputByIndex && TRITONBACKEND_RequestInputCount &&
             TRITONSERVER_InferenceRequestAppendInputData && TRITONSERVER_InferenceRequestRemoveAllInputData &&
             TRITONSERVER_InferenceRequestSetStringParameter && TRITONSERVER_ErrorDelete;
    if (usable) {
        if (auto* error = TRITONBACKEND_ApiVersion(&major, &minor)) return error;
        usable = major == 1;
    }
    if (!usable)
        fprintf(stderr, "batchstrategy.so: unknown Triton: a malformed request fails those it shares a batch with\n");
    return nullptr;
}

TRITONSERVER_Error* TRITONBACKEND_ModelBatcherFinalize(TRITONBACKEND_Batcher*) { return nullptr; }

TRITONSERVER_Error* TRITONBACKEND_ModelBatchInitialize(const TRITONBACKEND_Batcher*, void** batch) {
    *batch = nullptr;
    return nullptr;
}

// Called once or more for a request. Triton logs an error, and goes on.
TRITONSERVER_Error* TRITONBACKEND_ModelBatchIncludeRequest(TRITONBACKEND_Request* request, void*, bool* include) {
    *include = true;
    return usable ? check(request) : nullptr;
}

TRITONSERVER_Error* TRITONBACKEND_ModelBatchFinalize(void*) { return nullptr; }
}
