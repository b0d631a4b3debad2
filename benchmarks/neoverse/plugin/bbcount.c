// SPDX-License-Identifier: Apache-2.0
// A QEMU plugin that counts the basic blocks that a guest executes between two marks.
//
// The guest marks with a system call that changes nothing and whose second argument is the mark: a seek in /dev/null,
// or getpriority() of a process that does not exist. 0x5eed0000 sets the counts to zero, 0x5eed0001 + N writes them to
// PREFIX.N, one line a block: "executions address word word ...", all but the first in hexadecimal. The plugin takes
// out=PREFIX.
//
// It counts one thread at a time: the increments are not atomic. QEMU 7.2 to 8.2 (plugin API 1).
#include <inttypes.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORTED __attribute__((visibility("default")))

// The part of QEMU's plugin interface that is used; Debian has no package with its header.
typedef uint64_t qemu_plugin_id_t;
typedef struct qemu_info_t qemu_info_t;
struct qemu_plugin_tb;
struct qemu_plugin_insn;
enum qemu_plugin_op { QEMU_PLUGIN_INLINE_ADD_U64 };
typedef void (*translation_callback)(qemu_plugin_id_t, struct qemu_plugin_tb*);
typedef void (*syscall_callback)(qemu_plugin_id_t, unsigned int, int64_t, uint64_t, uint64_t, uint64_t, uint64_t,
                                 uint64_t, uint64_t, uint64_t, uint64_t);
void qemu_plugin_register_vcpu_tb_trans_cb(qemu_plugin_id_t, translation_callback);
void qemu_plugin_register_vcpu_syscall_cb(qemu_plugin_id_t, syscall_callback);
void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb*, enum qemu_plugin_op, void*, uint64_t);
uint64_t qemu_plugin_tb_vaddr(const struct qemu_plugin_tb*);
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb*);
struct qemu_plugin_insn* qemu_plugin_tb_get_insn(const struct qemu_plugin_tb*, size_t);
const void* qemu_plugin_insn_data(const struct qemu_plugin_insn*);
EXPORTED int qemu_plugin_version = 1;

enum { LSEEK = 62, GETPRIORITY = 141 };  // their numbers on aarch64 Linux
static const uint32_t kStart = 0x5eed0000u;
static const uint32_t kMarkMask = 0xffff0000u;

struct block {
  struct block* next;
  uint64_t executions, address;
  size_t length;
  uint32_t words[];
};

static struct block* blocks;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static const char* prefix;

static void fail(const char* what) {
  perror(what);
  _Exit(125);
}

static void on_translation(qemu_plugin_id_t id, struct qemu_plugin_tb* tb) {
  (void)id;
  const size_t length = qemu_plugin_tb_n_insns(tb);
  struct block* block = calloc(1, sizeof *block + length * sizeof block->words[0]);
  if (block == NULL) fail("bbcount: calloc");
  block->address = qemu_plugin_tb_vaddr(tb);
  block->length = length;
  for (size_t i = 0; i < length; ++i) {
    memcpy(&block->words[i], qemu_plugin_insn_data(qemu_plugin_tb_get_insn(tb, i)), sizeof block->words[i]);
  }
  pthread_mutex_lock(&lock);
  block->next = blocks;
  blocks = block;
  pthread_mutex_unlock(&lock);
  qemu_plugin_register_vcpu_tb_exec_inline(tb, QEMU_PLUGIN_INLINE_ADD_U64, &block->executions, 1);
}

static void write_counts(uint32_t region) {
  char path[4096];
  snprintf(path, sizeof path, "%s.%" PRIu32, prefix, region);
  FILE* file = fopen(path, "w");
  if (file == NULL) fail(path);
  for (const struct block* block = blocks; block != NULL; block = block->next) {
    if (block->executions == 0) continue;
    fprintf(file, "%" PRIu64 " %" PRIx64, block->executions, block->address);
    for (size_t i = 0; i < block->length; ++i) fprintf(file, " %08" PRIx32, block->words[i]);
    fputc('\n', file);
  }
  if (fclose(file) != 0) fail(path);
}

static void on_syscall(qemu_plugin_id_t id, unsigned int vcpu, int64_t number, uint64_t first, uint64_t second,
                       uint64_t a3, uint64_t a4, uint64_t a5, uint64_t a6, uint64_t a7, uint64_t a8) {
  (void)id, (void)vcpu, (void)first, (void)a3, (void)a4, (void)a5, (void)a6, (void)a7, (void)a8;
  const uint32_t mark = (uint32_t)second;
  if ((number != LSEEK && number != GETPRIORITY) || (mark & kMarkMask) != kStart) return;
  pthread_mutex_lock(&lock);
  if (mark == kStart) {
    for (struct block* block = blocks; block != NULL; block = block->next) block->executions = 0;
  } else {
    write_counts(mark - kStart - 1);
  }
  pthread_mutex_unlock(&lock);
}

EXPORTED int qemu_plugin_install(qemu_plugin_id_t id, const qemu_info_t* info, int argc, char** argv) {
  (void)info;
  for (int i = 0; i < argc; ++i) {
    if (strncmp(argv[i], "out=", 4) == 0) prefix = strdup(argv[i] + 4);
  }
  if (prefix == NULL) {
    fputs("bbcount: expected the argument out=PREFIX\n", stderr);
    return -1;
  }
  qemu_plugin_register_vcpu_tb_trans_cb(id, on_translation);
  qemu_plugin_register_vcpu_syscall_cb(id, on_syscall);
  return 0;
}
