/* A known-answer server for rates that Python cannot serve exactly: epoll, one thread, no allocation while it answers.
 *
 *   known_answer PORT FIRST_MS GAP_MS
 *
 * Every POST gets an event stream of as many one-token pieces as its max_tokens asks for: the first after FIRST_MS,
 * then one every GAP_MS, then usage and [DONE]. With GAP_MS 0 all pieces are due at once; each is still a chunk of
 * its own. GET /lateness answers with how late its own writes were (seconds). Prints its URL when it listens.
 */

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#define MAX_CONNECTIONS 8192
#define MAX_LATENESS (1 << 22)
#define PIECE "{\"object\":\"text_completion\",\"choices\":[{\"index\":0,\"text\":\" tok\",\"finish_reason\":null}]}"
#define LAST "{\"object\":\"text_completion\",\"choices\":[{\"index\":0,\"text\":\" tok\",\"finish_reason\":\"length\"}]}"
#define OUT_ROOM (256 << 10)
#define HEAD                                                                                                           \
    "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
#define MODELS "{\"object\":\"list\",\"data\":[{\"id\":\"known-answer\",\"object\":\"model\"}]}"

typedef struct {
    int fd;
    /* The request so far: head, then only a window of the body, so that long prompts cost no memory. */
    char head[16384];
    size_t head_size;
    long body_left;
    int reading_body, prompt_tokens, max_tokens, in_prompt;
    char tail[64];
    size_t tail_size;
    /* The answer. */
    int playing, sent;
    double next_due;
    char *out;
    size_t out_size, out_at;
    int heap_at;
} Connection;

static Connection *connections[MAX_CONNECTIONS];
static Connection *heap[MAX_CONNECTIONS];
static int heap_size;
static double first_s, gap_s;
static float *lateness;
static size_t lateness_size;
static int epoll_fd;
static char piece[256], last[256];
static size_t piece_size, last_size;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static void place(int at, Connection *c) {
    heap[at] = c;
    c->heap_at = at;
}

static void sift(int at) {
    Connection *c = heap[at];
    while (at > 0 && heap[(at - 1) / 2]->next_due > c->next_due) {
        place(at, heap[(at - 1) / 2]);
        at = (at - 1) / 2;
    }
    for (;;) {
        int child = 2 * at + 1;
        if (child >= heap_size) break;
        if (child + 1 < heap_size && heap[child + 1]->next_due < heap[child]->next_due) child++;
        if (heap[child]->next_due >= c->next_due) break;
        place(at, heap[child]);
        at = child;
    }
    place(at, c);
}

static void heap_add(Connection *c) {
    heap[heap_size] = c;
    c->heap_at = heap_size;
    heap_size++;
    sift(c->heap_at);
}

static void heap_remove(Connection *c) {
    int at = c->heap_at;
    if (at < 0) return;
    heap_size--;
    if (at != heap_size) {
        place(at, heap[heap_size]);
        sift(at);
    }
    c->heap_at = -1;
}

static void drop(Connection *c) {
    heap_remove(c);
    connections[c->fd] = NULL;
    close(c->fd);
    free(c->out);
    free(c);
}

static void watch(Connection *c, int writing) {
    struct epoll_event event = {.events = EPOLLIN | (writing ? EPOLLOUT : 0), .data.fd = c->fd};
    epoll_ctl(epoll_fd, EPOLL_CTL_MOD, c->fd, &event);
}

static void append(Connection *c, const char *data, size_t size) {
    memcpy(c->out + c->out_size, data, size);
    c->out_size += size;
}

/* Writes what is queued; 0 when the connection is gone. */
static int flush_out(Connection *c) {
    while (c->out_at < c->out_size) {
        ssize_t n = send(c->fd, c->out + c->out_at, c->out_size - c->out_at, MSG_NOSIGNAL);
        if (n < 0) {
            if (errno != EAGAIN) return drop(c), 0;
            watch(c, 1);
            return 1;
        }
        c->out_at += n;
    }
    c->out_at = c->out_size = 0;
    return 1;
}

static void finish(Connection *c) {
    char usage[256], chunk[320];
    int total = c->prompt_tokens + c->max_tokens;
    int n = snprintf(usage, sizeof usage,
                     "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":%d,\"completion_tokens\":%d,\"total_tokens\":%d}}"
                     "\n\ndata: [DONE]\n\n",
                     c->prompt_tokens, c->max_tokens, total);
    int m = snprintf(chunk, sizeof chunk, "%x\r\n%s\r\n0\r\n\r\n", n, usage);
    append(c, chunk, m);
    c->playing = 0;
    heap_remove(c);
}

/* Everything of this connection that is due; the pieces of a moment go out in as few writes as the socket takes. */
static void play(Connection *c, double t) {
    while (c->playing && c->next_due <= t && c->out_size + 1024 < OUT_ROOM) {
        if (lateness_size < MAX_LATENESS) lateness[lateness_size++] = (float)(t - c->next_due);
        if (c->sent == 0) append(c, HEAD, sizeof HEAD - 1);
        c->sent++;
        int is_last = c->sent >= c->max_tokens;
        append(c, is_last ? last : piece, is_last ? last_size : piece_size);
        c->next_due += gap_s;
        if (is_last) finish(c);
    }
    if (c->playing) sift(c->heap_at);
    flush_out(c);
}

static int by_size(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static void answer_get(Connection *c) {
    char body[512], text[1024];
    if (strstr(c->head, " /lateness")) {
        struct rusage used;
        getrusage(RUSAGE_SELF, &used);
        double cpu = used.ru_utime.tv_sec + used.ru_stime.tv_sec + (used.ru_utime.tv_usec + used.ru_stime.tv_usec) * 1e-6;
        qsort(lateness, lateness_size, sizeof *lateness, by_size);
        size_t n = lateness_size;
        float p50 = n ? lateness[(n - 1) / 2] : 0, p99 = n ? lateness[(size_t)(0.99 * (n - 1))] : 0;
        snprintf(body, sizeof body, "{\"p50\":%g,\"p99\":%g,\"max\":%g,\"writes\":%zu,\"cpu_s\":%g}", p50, p99,
                 n ? lateness[n - 1] : 0, n, cpu);
    } else {
        snprintf(body, sizeof body, "%s", MODELS);
    }
    int n = snprintf(text, sizeof text, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %zu\r\n\r\n%s",
                     strlen(body), body);
    append(c, text, n);
    flush_out(c);
}

static void start(Connection *c) {
    c->reading_body = 0;
    c->head_size = 0;
    c->playing = 1;
    c->sent = 0;
    c->next_due = now() + first_s;
    if (c->max_tokens < 1) c->max_tokens = 1;
    heap_add(c);
}

/* Counts the ids of the prompt and finds max_tokens as the body goes by; a number split over two reads is kept. */
static void scan(Connection *c, const char *data, size_t size) {
    static char joined[(1 << 18) + 64];
    memcpy(joined, c->tail, c->tail_size);
    memcpy(joined + c->tail_size, data, size);
    size_t total = c->tail_size + size;
    size_t keep = total < 40 ? total : 40;
    joined[total] = 0;
    char *found = strstr(joined, "\"max_tokens\":");
    if (found && found + 20 < joined + total) c->max_tokens = atoi(found + 13);
    else if (found && c->body_left == 0) c->max_tokens = atoi(found + 13);
    char *at = joined + c->tail_size, *end = joined + total;
    if (!c->in_prompt && (found = strstr(joined, "\"prompt\": ["))) {
        c->in_prompt = 1;
        c->prompt_tokens = 1;
        at = found + 11 > at ? found + 11 : at;
    }
    if (c->in_prompt == 1) {
        char *stop = memchr(at, ']', end - at);
        if (stop) c->in_prompt = 2;
        for (char *p = at; p < (stop ? stop : end); p++) c->prompt_tokens += *p == ',';
    }
    memcpy(c->tail, joined + total - keep, keep);
    c->tail_size = keep;
}

static void receive(Connection *c) {
    static char data[1 << 18];
    ssize_t n = recv(c->fd, data, sizeof data, 0);
    if (n <= 0) {
        if (n == 0 || errno != EAGAIN) drop(c);
        return;
    }
    char *at = data;
    size_t size = n;
    while (size > 0) {
        if (!c->reading_body) {
            size_t take = size < sizeof c->head - 1 - c->head_size ? size : sizeof c->head - 1 - c->head_size;
            memcpy(c->head + c->head_size, at, take);
            c->head[c->head_size + take] = 0;
            char *end = strstr(c->head, "\r\n\r\n");
            if (!end) {
                c->head_size += take;
                if (take < size) return drop(c);
                return;
            }
            size_t used = end + 4 - c->head - c->head_size;
            at += used;
            size -= used;
            *end = 0;
            char *length = strcasestr(c->head, "content-length:");
            c->body_left = length ? atol(length + 15) : 0;
            c->head_size = 0;
            if (!c->body_left) {
                answer_get(c);
                return;
            }
            c->reading_body = 1;
            c->prompt_tokens = c->max_tokens = c->in_prompt = 0;
            c->tail_size = 0;
        }
        size_t take = size < (size_t)c->body_left ? size : (size_t)c->body_left;
        c->body_left -= take;
        scan(c, at, take);
        at += take;
        size -= take;
        if (!c->body_left) start(c);
    }
}

static void welcome(int listener) {
    int fd;
    while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
        if (fd >= MAX_CONNECTIONS) {
            close(fd);
            continue;
        }
        int one = 1;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        Connection *c = calloc(1, sizeof *c);
        c->fd = fd;
        c->heap_at = -1;
        c->out = malloc(OUT_ROOM);
        connections[fd] = c;
        struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
        epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event);
    }
}

static size_t chunk(char *to, const char *json) {
    return sprintf(to, "%zx\r\ndata: %s\n\n\r\n", strlen(json) + 8, json);
}

int main(int argc, char **argv) {
    if (argc != 4) return fprintf(stderr, "usage: known_answer PORT FIRST_MS GAP_MS\n"), 2;
    first_s = atof(argv[2]) / 1000;
    gap_s = atof(argv[3]) / 1000;
    lateness = malloc(MAX_LATENESS * sizeof *lateness);
    piece_size = chunk(piece, PIECE);
    last_size = chunk(last, LAST);
    struct rlimit files = {MAX_CONNECTIONS, MAX_CONNECTIONS};
    setrlimit(RLIMIT_NOFILE, &files);
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), one = 1;
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(atoi(argv[1]))};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof address;
    if (bind(listener, (struct sockaddr *)&address, length) || listen(listener, 4096)) return perror("listen"), 1;
    getsockname(listener, (struct sockaddr *)&address, &length);
    printf("http://127.0.0.1:%d/v1\n", ntohs(address.sin_port));
    fflush(stdout);
    epoll_fd = epoll_create1(0);
    struct epoll_event event = {.events = EPOLLIN, .data.fd = listener};
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, listener, &event);
    int timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
    event.data.fd = timer;
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, timer, &event);
    struct epoll_event events[1024];
    for (;;) {
        int timeout = -1;
        if (heap_size) {
            double due = heap[0]->next_due;
            struct itimerspec at = {.it_value = {.tv_sec = (time_t)due, .tv_nsec = (long)((due - (time_t)due) * 1e9) + 1}};
            timerfd_settime(timer, TFD_TIMER_ABSTIME, &at, NULL);
            /* A connection whose socket is full waits for it, not for its time. */
            timeout = heap[0]->out_size > heap[0]->out_at ? 1 : -1;
        }
        int count = epoll_wait(epoll_fd, events, 1024, timeout);
        for (int i = 0; i < count; i++) {
            int fd = events[i].data.fd;
            if (fd == listener) welcome(listener);
            else if (fd == timer) {
                unsigned long long expired;
                if (read(timer, &expired, sizeof expired) < 0) continue;
            } else if (connections[fd]) {
                Connection *c = connections[fd];
                if (events[i].events & EPOLLOUT) {
                    watch(c, 0);
                    if (!flush_out(c)) continue;
                }
                if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) receive(c);
            }
        }
        double t = now();
        int guard = heap_size;
        while (heap_size && heap[0]->next_due <= t && guard-- > 0) {
            Connection *c = heap[0];
            if (c->out_size > c->out_at) {
                c->next_due = t + 1e-3;
                sift(0);
                continue;
            }
            play(c, t);
        }
    }
}
