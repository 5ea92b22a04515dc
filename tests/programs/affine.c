/* A libllama of build 11549's shape, whose model may be touched by the thread alone that loaded it.

   Whoever else loads, computes, draws or frees with it aborts the process, as an accelerator may that
   keeps its state with a thread. The model has three tokens: it says "ab"
   for ever. A model whose file begins with "no" cannot be loaded. */

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static pthread_t owner;
static bool owned;
static int last;

static void check(const char *what) {
    if (owned && !pthread_equal(owner, pthread_self())) {
        fprintf(stderr, "%s was called on a thread that does not own the model\n", what);
        abort();
    }
}

struct model_params {
    void *devices, *overrides;
    int32_t n_gpu_layers, split_mode, load_mode, lazy_mode, main_gpu;
    void *tensor_split;
    bool (*progress)(float, void *);
    void *progress_data, *kv_overrides;
    bool vocab_only, check_tensors, use_extra_bufts, no_host, no_alloc, load_mtp;
};

struct context_params {
    uint32_t n_ctx, n_batch, n_ubatch, n_seq_max, n_rs_seq, outputs, outputs_per_seq;
    int32_t n_threads, n_threads_batch, enums[5];
    float floats[6];
    uint32_t yarn_orig_ctx;
    float defrag;
    void *eval, *eval_data;
    int32_t type_k, type_v;
    void *pointers[3];
    bool embeddings, offload_kqv, no_perf, op_offload, swa_full, kv_unified;
    void *samplers;
    size_t n_samplers;
    void *other;
};

struct batch {
    int32_t n_tokens;
    int32_t *token;
    float *embd;
    int32_t *pos, *n_seq_id, **seq_id;
    int8_t *logits;
};

static uint32_t context;

void llama_backend_init(void) {}
const char *llama_version(void) { return "affine"; }
void llama_log_set(void *callback, void *data) { (void) callback, (void) data; }

struct model_params llama_model_default_params(void) {
    struct model_params p = {0};
    p.n_gpu_layers = -1, p.split_mode = 1, p.load_mode = -1, p.use_extra_bufts = true;
    return p;
}

struct context_params llama_context_default_params(void) {
    struct context_params p = {0};
    p.n_ctx = 512, p.n_batch = 2048, p.n_ubatch = 512, p.n_seq_max = 1;
    for (int i = 1; i < 5; i++) p.enums[i] = -1;
    p.type_k = p.type_v = 1;
    p.offload_kqv = p.no_perf = p.op_offload = p.swa_full = true;
    return p;
}

void *llama_model_load_from_file(const char *path, struct model_params p) {
    char head[2] = "";
    FILE *file = fopen(path, "rb");
    if (!file || fread(head, 1, 2, file) != 2 || !memcmp(head, "no", 2)) return NULL;
    fclose(file);
    check("load");
    owner = pthread_self(), owned = true;
    return p.progress(1.0f, p.progress_data) ? &owner : NULL;
}

void llama_model_free(void *model) { (void) model, check("model_free"), owned = false; }
void *llama_model_get_vocab(void *model) { return model; }
const char *llama_model_chat_template(void *model, const char *name) { return (void) model, name; }
int32_t llama_model_n_ctx_train(void *model) { return (void) model, 4096; }
bool llama_model_has_encoder(void *model) { return (void) model, false; }
bool llama_model_has_decoder(void *model) { return (void) model, true; }

void *llama_init_from_model(void *model, struct context_params p) {
    check("init");
    context = p.n_ctx / p.n_seq_max;
    return model;
}

void llama_free(void *c) { (void) c, check("free"); }
uint32_t llama_n_ctx_seq(void *c) { return (void) c, context; }
void llama_set_n_threads(void *c, int32_t n, int32_t m) { (void) c, (void) n, (void) m, check("n_threads"); }
void llama_set_abort_callback(void *c, void *f, void *d) { (void) c, (void) f, (void) d, check("abort"); }
void *llama_get_memory(void *c) { return check("memory"), c; }

bool llama_memory_seq_rm(void *m, int32_t seq, int32_t from, int32_t to) {
    return (void) m, (void) seq, (void) from, (void) to, check("seq_rm"), true;
}

int32_t llama_decode(void *c, struct batch batch) {
    (void) c, check("decode");
    struct timespec pause = {0, 1000000};
    nanosleep(&pause, NULL);
    last = batch.token[batch.n_tokens - 1];
    return 0;
}

int32_t llama_vocab_n_tokens(void *v) { return (void) v, 3; }
bool llama_vocab_is_eog(void *v, int32_t token) { return (void) v, token == 2; }

int32_t llama_tokenize(void *v, const char *text, int32_t size, int32_t *out, int32_t room, bool s, bool p) {
    (void) v, (void) text, (void) s, (void) p;
    if (size > room) return -size;
    for (int i = 0; i < size; i++) out[i] = 1;
    return size;
}

int32_t llama_token_to_piece(void *v, int32_t token, char *out, int32_t room, int32_t lstrip, bool s) {
    (void) v, (void) room, (void) lstrip, (void) s;
    out[0] = "ab."[token];
    return 1;
}

int32_t llama_chat_apply_template(const char *t, void *chat, size_t n, bool answer, char *out, int32_t room) {
    (void) t, (void) chat, (void) n, (void) answer, (void) room;
    out[0] = '>';
    return 1;
}

float *llama_get_logits_ith(void *c, int32_t i) {
    static float logits[3];
    (void) c, (void) i, check("logits");
    logits[last == 0] = 9;
    logits[last != 0] = 0;
    return logits;
}

int32_t llama_model_meta_val_str(void *m, const char *key, char *out, size_t room) {
    (void) m, (void) key, (void) out, (void) room;
    return -1;
}

struct candidates {
    void *data;
    size_t size;
    int64_t selected;
    bool sorted;
};

void llama_sampler_apply(void *s, struct candidates *c) { (void) s, check("apply"), c->selected = last == 0; }

static void *sampler(void) { return check("sampler"), malloc(1); }
void *llama_sampler_chain_init(bool no_perf) { return (void) no_perf, sampler(); }
void llama_sampler_chain_add(void *chain, void *one) { (void) chain, check("chain_add"), free(one); }
int32_t llama_sampler_sample(void *s, void *c, int32_t i) { return (void) s, (void) c, (void) i, check("sample"), last == 0; }
void llama_sampler_free(void *s) { check("sampler_free"), free(s); }
void llama_sampler_accept(void *s, int32_t token) { (void) s, (void) token, check("accept"); }
void *llama_sampler_init_greedy(void) { return sampler(); }
void *llama_sampler_init_dist(uint32_t seed) { return (void) seed, sampler(); }
void *llama_sampler_init_top_k(int32_t k) { return (void) k, sampler(); }
void *llama_sampler_init_top_p(float p, size_t keep) { return (void) p, (void) keep, sampler(); }
void *llama_sampler_init_min_p(float p, size_t keep) { return (void) p, (void) keep, sampler(); }
void *llama_sampler_init_typical(float p, size_t keep) { return (void) p, (void) keep, sampler(); }
void *llama_sampler_init_temp(float t) { return (void) t, sampler(); }
void *llama_sampler_init_grammar(void *v, const char *g, const char *root) { return (void) v, (void) root, strchr(g, ':') ? sampler() : NULL; }
void *llama_sampler_init_penalties(int32_t v, int32_t n, float r, float f, float p) { return (void) v, (void) n, (void) r, (void) f, (void) p, sampler(); }
void *llama_sampler_init_logit_bias(int32_t v, int32_t n, void *b) { return (void) v, (void) n, (void) b, sampler(); }
