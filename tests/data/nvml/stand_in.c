/* A stand-in for libnvidia-ml.so.1 that answers as one made-up GPU would: no device said this.

   It shows that the binding, its structures and our calls fit together; layouts and names are those
   of NVML's API reference. STAND_IN_LOST_AFTER=N: from the Nth reading of fields on, GPUs are lost.
   STAND_IN_GPUS=N: there are N of them.
*/
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, TIMEOUT = 10, LOST = 15 };
typedef void *device_t;
typedef struct { unsigned id, scope; int64_t at, took; int type, error; union { double d; unsigned ui; uint64_t ull; } v; } field_t;
typedef struct { unsigned version; uint64_t total, reserved, free_, used; } memory_t;
typedef struct { unsigned gpu, memory; } utilization_t;
typedef struct { unsigned pid; uint64_t used; unsigned gpu_instance, compute_instance; } process_t;
typedef struct { unsigned pid; uint64_t at; unsigned sm, mem, enc, dec; } process_use_t;
typedef struct { unsigned id; int error; double value; const char *name, *long_name, *unit; } gpm_metric_t;
typedef struct { unsigned version, count; int *first, *second; gpm_metric_t metrics[477]; } gpm_request_t;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } pci_t;
typedef struct { device_t device; uint64_t kind, data; unsigned gpu_instance, compute_instance; } event_t;

static int the_devices[64], the_events, readings, events_left = 1;

static int lost(void) {
    const char *after = getenv("STAND_IN_LOST_AFTER");
    return after && readings >= atoi(after);
}

int nvmlInitWithFlags(unsigned flags) { return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int error) { return "made up"; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { strcpy(text, "580.00.00"); return SUCCESS; }
int nvmlDeviceGetCount_v2(unsigned *count) {
    const char *wanted = getenv("STAND_IN_GPUS");
    *count = wanted ? atoi(wanted) : 1;
    return SUCCESS;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, device_t *device) {
    *device = &the_devices[index];
    return lost() ? LOST : SUCCESS;
}
int nvmlDeviceGetIndex(device_t device, unsigned *index) { *index = (int *)device - the_devices; return SUCCESS; }
int nvmlDeviceGetUUID(device_t device, char *text, unsigned size) {
    strcpy(text, "GPU-00000000-0000-4000-8000-0000000000c0");
    text[strlen(text) - 1] += (int *)device - the_devices;
    return SUCCESS;
}
int nvmlDeviceGetPciInfo_v3(device_t device, pci_t *pci) {
    memset(pci, 0, sizeof *pci);
    strcpy(pci->bus_id, "00000000:1B:00.0");
    return SUCCESS;
}
int nvmlDeviceGetTopologyCommonAncestor(device_t one, device_t other, int *level) {
    *level = other == one ? 0 : 50;
    return SUCCESS;
}
int nvmlDeviceGetMaxPcieLinkGeneration(device_t device, unsigned *value) { *value = 5; return SUCCESS; }
int nvmlDeviceGetMaxPcieLinkWidth(device_t device, unsigned *value) { *value = 16; return SUCCESS; }
/* Three links: the first to a switch, the second to another GPU, the third not active. */
int nvmlDeviceGetNvLinkState(device_t device, unsigned link, unsigned *active) {
    *active = link < 2;
    return link < 3 ? SUCCESS : 2;
}
int nvmlDeviceGetNvLinkRemoteDeviceType(device_t device, unsigned link, unsigned *kind) {
    *kind = link ? 0 : 2;
    return SUCCESS;
}
int nvmlDeviceGetNvLinkRemotePciInfo_v2(device_t device, unsigned link, pci_t *pci) {
    return nvmlDeviceGetPciInfo_v3(device, pci);
}
int nvmlDeviceGetName(device_t device, char *text, unsigned size) { strcpy(text, "Made-up GPU"); return SUCCESS; }

int nvmlDeviceGetFieldValues(device_t device, int count, field_t *fields) {
    if (lost()) return LOST;
    readings++;
    for (int at = 0; at < count; at++) {
        field_t *field = &fields[at];
        field->error = SUCCESS;
        field->type = 3;
        switch (field->id) {
        case 83: field->v.ull = 1000000 + 30000 * (uint64_t)readings; break;
        case 186: field->type = 1; field->v.ui = 300000; break;
        case 82: field->type = 1; field->v.ui = 61; break;
        case 138: case 139: field->v.ull = field->scope == UINT32_MAX ? 4096 : 1; break;
        case 74: field->v.ull = 5; break;
        default: field->error = NOT_SUPPORTED;
        }
    }
    return SUCCESS;
}
int nvmlDeviceGetUtilizationRates(device_t device, utilization_t *use) { *use = (utilization_t){90, 40}; return SUCCESS; }
int nvmlDeviceGetMemoryInfo_v2(device_t device, memory_t *memory) {
    if (memory->version != 0x02000028) return NOT_SUPPORTED;
    *memory = (memory_t){memory->version, 1000, 100, 300, 600};
    return SUCCESS;
}
int nvmlDeviceGetClockInfo(device_t device, int kind, unsigned *mhz) { *mhz = kind == 1 ? 1500 : 2000; return SUCCESS; }
int nvmlDeviceGetMaxClockInfo(device_t device, int kind, unsigned *mhz) { *mhz = kind == 1 ? 1600 : 2000; return SUCCESS; }
int nvmlDeviceGetMemoryBusWidth(device_t device, unsigned *bits) { *bits = 4096; return SUCCESS; }
int nvmlDeviceGetCurrentClocksEventReasons(device_t device, uint64_t *bits) { *bits = 0x44; return SUCCESS; }
int nvmlDeviceGetCurrPcieLinkGeneration(device_t device, unsigned *value) { *value = 5; return SUCCESS; }
int nvmlDeviceGetCurrPcieLinkWidth(device_t device, unsigned *value) { *value = 16; return SUCCESS; }
int nvmlDeviceGetTemperature(device_t device, int sensor, unsigned *celsius) { *celsius = 50; return SUCCESS; }
int nvmlDeviceGetEnforcedPowerLimit(device_t device, unsigned *mw) { *mw = 700000; return SUCCESS; }
int nvmlDeviceGetTotalEccErrors(device_t device, int kind, int counter, uint64_t *count) {
    *count = kind ? 0 : 2;
    return SUCCESS;
}
int nvmlDeviceGetRemappedRows(device_t device, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
    *corrected = 3, *uncorrected = *pending = *failed = 0;
    return SUCCESS;
}
int nvmlDeviceGetComputeRunningProcesses_v3(device_t device, unsigned *count, process_t *found) {
    unsigned room = *count;
    *count = 2;
    if (room < 2) return INSUFFICIENT_SIZE;
    found[0] = (process_t){77, 4096, 0, 0};
    found[1] = (process_t){78, UINT64_MAX, 0, 0}; /* NVML_VALUE_NOT_AVAILABLE */
    return SUCCESS;
}
int nvmlDeviceGetProcessUtilization(device_t device, process_use_t *found, unsigned *count, uint64_t since) {
    if (since >= 123456) return NOT_FOUND;
    *count = 1;
    if (!found) return INSUFFICIENT_SIZE;
    found[0] = (process_use_t){77, 123456, 80, 30, 0, 0};
    return SUCCESS;
}

int nvmlGpmQueryDeviceSupport(device_t device, unsigned support[2]) { support[1] = 1; return SUCCESS; }
int nvmlGpmSampleAlloc(int **sample) { *sample = calloc(1, sizeof(int)); return SUCCESS; }
int nvmlGpmSampleFree(int *sample) { free(sample); return SUCCESS; }
int nvmlGpmSampleGet(device_t device, int *sample) { *sample = ++*(int *)device; return lost() ? LOST : SUCCESS; }
int nvmlGpmMetricsGet(gpm_request_t *request) {
    if (*request->second != *request->first + 1) return 2; /* not the two last samples, in order */
    for (unsigned at = 0; at < request->count; at++) {
        gpm_metric_t *metric = &request->metrics[at];
        metric->error = metric->id == 20 ? NOT_SUPPORTED : SUCCESS;
        metric->value = metric->id;
    }
    return SUCCESS;
}

int nvmlEventSetCreate(void **set) { *set = &the_events; return SUCCESS; }
int nvmlEventSetFree(void *set) { return SUCCESS; }
int nvmlDeviceGetSupportedEventTypes(device_t device, uint64_t *kinds) { *kinds = 0x1F; return SUCCESS; }
int nvmlDeviceRegisterEvents(device_t device, uint64_t kinds, void *set) { return kinds == 0xA ? SUCCESS : NOT_SUPPORTED; }
int nvmlEventSetWait_v2(void *set, event_t *event, unsigned timeout_ms) {
    if (!events_left) return TIMEOUT;
    events_left--;
    *event = (event_t){the_devices, 8, 79, 0, 0};
    return SUCCESS;
}
