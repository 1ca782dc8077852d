/* What a provider of libfabric moves between two processes with nothing above it: the reference for transfers over `ofi+...://`.
 *
 *     raw server PROVIDER            listens on the loopback interface, prints its address, serves until its input ends
 *     raw messages PROVIDER ADDRESS SIZE COUNT WINDOW    tagged messages from the server, WINDOW of them posted at a time
 *     raw reads PROVIDER ADDRESS SIZE COUNT WINDOW       RMA reads of the server's memory, WINDOW at a time
 *
 * The client prints the nanoseconds that each took. Both spin. */

#include <arpa/inet.h>
#include <poll.h>
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <rdma/fi_tagged.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define REQUEST 1
#define DATA 2
#define KEY 7
#define LARGEST ((size_t)64 << 20)
#define MOST 64

#define CHECK(call) check((call), #call)

static struct fi_info *info;
static struct fid_fabric *fabric;
static struct fid_domain *domain;
static struct fid_ep *ep;
static struct fid_av *av;
static struct fid_cq *cq;
static struct fid_mr *mr;
static char *memory;

/* Asks the server for COUNT messages of SIZE bytes, or where its memory is. */
struct request {
    char address[64];
    uint64_t address_len, size, count, window;
};

struct place {
    uint64_t address, key;
};

static void check(ssize_t result, const char *what) {
    if (result < 0) {
        fprintf(stderr, "%s: %s\n", what, fi_strerror((int)-result));
        exit(1);
    }
}

static void open_endpoint(const char *provider) {
    struct fi_info *hints = fi_allocinfo();
    hints->fabric_attr->prov_name = strdup(provider);
    hints->ep_attr->type = FI_EP_RDM;
    hints->caps = FI_TAGGED | FI_RMA | FI_MSG;
    hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
    const char *node = getenv("CALOMEL_OFI_IP");
    CHECK(fi_getinfo(FI_VERSION(2, 0), node ? node : "127.0.0.1", "0", FI_SOURCE, hints, &info));
    fi_freeinfo(hints);
    CHECK(fi_fabric(info->fabric_attr, &fabric, NULL));
    CHECK(fi_domain(fabric, info, &domain, NULL));
    struct fi_av_attr av_attr = {.type = FI_AV_TABLE};
    CHECK(fi_av_open(domain, &av_attr, &av, NULL));
    struct fi_cq_attr cq_attr = {.format = FI_CQ_FORMAT_TAGGED, .size = 1024, .wait_obj = FI_WAIT_NONE};
    CHECK(fi_cq_open(domain, &cq_attr, &cq, NULL));
    CHECK(fi_endpoint(domain, info, &ep, NULL));
    CHECK(fi_ep_bind(ep, &av->fid, 0));
    CHECK(fi_ep_bind(ep, &cq->fid, FI_TRANSMIT | FI_RECV));
    CHECK(fi_enable(ep));
    memory = malloc(LARGEST);
    memset(memory, 1, LARGEST);
    uint64_t access = FI_SEND | FI_RECV | FI_READ | FI_WRITE | FI_REMOTE_READ;
    CHECK(fi_mr_reg(domain, memory, LARGEST, access, 0, KEY, 0, &mr, NULL));
}

/* Waits for one completion, and returns its flags. */
static uint64_t completed(void) {
    struct fi_cq_tagged_entry entry;
    for (;;) {
        ssize_t got = fi_cq_read(cq, &entry, 1);
        if (got == 1)
            return entry.flags;
        if (got == -FI_EAVAIL) {
            struct fi_cq_err_entry error = {0};
            fi_cq_readerr(cq, &error, 0);
            fprintf(stderr, "an operation failed: %s\n", fi_strerror(error.err));
            exit(1);
        }
        if (got != -FI_EAGAIN)
            CHECK(got);
    }
}

static void again(ssize_t result, const char *what) {
    if (result == -FI_EAGAIN) {
        fi_cq_read(cq, NULL, 0);
        return;
    }
    check(result, what);
}

#define UNTIL_TAKEN(call)                                                                                                      \
    for (ssize_t result = -FI_EAGAIN; result == -FI_EAGAIN;)                                                                   \
    again(result = (call), #call)

static fi_addr_t insert(const void *address) {
    fi_addr_t peer;
    if (fi_av_insert(av, address, 1, &peer, 0, NULL) != 1) {
        fprintf(stderr, "the provider does not take the address\n");
        exit(1);
    }
    return peer;
}

static void serve(void) {
    char name[64];
    size_t len = sizeof name;
    CHECK(fi_getname(&ep->fid, name, &len));
    for (size_t i = 0; i < len; i++)
        printf("%02x", (unsigned char)name[i]);
    printf("\n");
    fflush(stdout);
    static struct request request;
    static struct place place;
    for (;;) {
        UNTIL_TAKEN(fi_trecv(ep, &request, sizeof request, NULL, FI_ADDR_UNSPEC, REQUEST, 0, NULL));
        struct fi_cq_tagged_entry entry;
        ssize_t got;
        for (unsigned spins = 0; (got = fi_cq_read(cq, &entry, 1)) == -FI_EAGAIN; spins++) {
            struct pollfd input = {.fd = 0, .events = POLLIN};
            if (spins % 1024 == 0 && poll(&input, 1, 0) > 0)
                exit(0);
        }
        if (got == -FI_EAVAIL)
            completed();
        fi_addr_t peer = insert(request.address);
        if (request.size == 0) {
            int virtual = info->domain_attr->mr_mode & FI_MR_VIRT_ADDR;
            place.address = virtual ? (uint64_t)(uintptr_t)memory : 0;
            place.key = fi_mr_key(mr);
            UNTIL_TAKEN(fi_tsend(ep, &place, sizeof place, NULL, peer, DATA, NULL));
            completed();
            continue;
        }
        uint64_t sent = 0;
        for (uint64_t posted = 0; sent < request.count; sent++) {
            while (posted < request.count && posted - sent < request.window) {
                UNTIL_TAKEN(fi_tsend(ep, memory, request.size, fi_mr_desc(mr), peer, DATA, NULL));
                posted++;
            }
            completed();
        }
    }
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return 1e9 * (double)time.tv_sec + (double)time.tv_nsec;
}

static void ask(fi_addr_t server, struct request *request) {
    request->address_len = sizeof request->address;
    size_t len = sizeof request->address;
    CHECK(fi_getname(&ep->fid, request->address, &len));
    UNTIL_TAKEN(fi_tsend(ep, request, sizeof *request, NULL, server, REQUEST, NULL));
}

static double messages(fi_addr_t server, size_t size, uint64_t count, uint64_t window) {
    static struct request request;
    request = (struct request){.size = size, .count = count, .window = window};
    uint64_t posted = 0, received = 0, sent = 0;
    size_t places = LARGEST / size;
    for (; posted < count && posted < window; posted++)
        UNTIL_TAKEN(fi_trecv(ep, memory + posted % places * size, size, fi_mr_desc(mr), FI_ADDR_UNSPEC, DATA, 0, NULL));
    double begin = now();
    ask(server, &request);
    while (received < count || !sent) {
        if (!(completed() & FI_RECV)) {
            sent = 1;
            continue;
        }
        received++;
        if (posted < count) {
            UNTIL_TAKEN(fi_trecv(ep, memory + posted % places * size, size, fi_mr_desc(mr), FI_ADDR_UNSPEC, DATA, 0, NULL));
            posted++;
        }
    }
    return (now() - begin) / (double)count;
}

static double reads(fi_addr_t server, size_t size, uint64_t count, uint64_t window) {
    static struct request request;
    static struct place place;
    UNTIL_TAKEN(fi_trecv(ep, &place, sizeof place, NULL, FI_ADDR_UNSPEC, DATA, 0, NULL));
    ask(server, &request);
    completed();
    completed();
    size_t places = LARGEST / size;
    double begin = now();
    for (uint64_t posted = 0, done = 0; done < count; done++) {
        while (posted < count && posted - done < window) {
            size_t at = posted % places * size;
            UNTIL_TAKEN(fi_read(ep, memory + at, size, fi_mr_desc(mr), server, place.address + at, place.key, NULL));
            posted++;
        }
        completed();
    }
    return (now() - begin) / (double)count;
}

int main(int argc, char **argv) {
    if (argc == 3 && !strcmp(argv[1], "server")) {
        open_endpoint(argv[2]);
        serve();
    }
    if (argc != 7) {
        fprintf(stderr, "usage: see the source\n");
        return 2;
    }
    open_endpoint(argv[2]);
    unsigned char address[64] = {0};
    for (size_t i = 0; i < sizeof address && argv[3][2 * i]; i++)
        sscanf(argv[3] + 2 * i, "%2hhx", &address[i]);
    fi_addr_t server = insert(address);
    size_t size = strtoull(argv[4], NULL, 10), count = strtoull(argv[5], NULL, 10), window = strtoull(argv[6], NULL, 10);
    if (size == 0 || size > LARGEST || window == 0 || window > MOST)
        return 2;
    double (*move)(fi_addr_t, size_t, uint64_t, uint64_t) = strcmp(argv[1], "reads") ? messages : reads;
    /* The first message makes the connection. A tenth is not timed. */
    move(server, size, count / 10 > window ? count / 10 : window, window);
    printf("%.1f\n", move(server, size, count, window));
    return 0;
}
