/* What serves the bytes of a tunnel at its far end (load.h has the protocol). */
#include "load.h"

#include <string.h>

enum { TLS_HANDSHAKE = 22, RECORD_HEADER_BYTES = 5 };

static uint64_t u64(const uint8_t *at)
{
    uint64_t value = 0;
    for (int i = 0; i < 8; i++)
        value = value << 8 | at[i];
    return value;
}

static void done_if_done(struct stream *stream)
{
    if (stream->app_state != APP_EXCHANGE || stream->to_take || stream->to_send)
        return;
    if (!stream->last_sent) {
        stream->last_sent = true;
        stream_send_bulk(stream, 1); /* as bulk, for a window may just be full */
    } else {
        stream->last_sent = false;
        stream->app_state = APP_COMMAND;
        stream->command_bytes = 0;
    }
}

void app_drained(struct stream *stream)
{
    done_if_done(stream);
}

/* Collects up to `wanted` bytes of the command; how many of `data` that took. */
static size_t collect(struct stream *stream, size_t wanted, const uint8_t *data, size_t size)
{
    size_t part = wanted - stream->command_bytes;
    part = part < size ? part : size;
    memcpy(stream->command + stream->command_bytes, data, part);
    stream->command_bytes += part;
    return part;
}

static void command(struct stream *stream)
{
    if (stream->command[0] == 'E') {
        stream->app_state = APP_ECHO;
    } else if (stream->command[0] != 'X') {
        die("no command: %d", stream->command[0]);
    } else if (stream->command_bytes == COMMAND_BYTES) {
        uint64_t down = u64(stream->command + 9);
        stream->to_take = u64(stream->command + 1);
        stream->app_state = APP_EXCHANGE;
        if (down)
            stream_send_bulk(stream, down);
        done_if_done(stream);
    }
}

void app_data(struct stream *stream, const uint8_t *data, size_t size)
{
    while (size) {
        size_t part;
        switch (stream->app_state) {
        case APP_START: /* a hello, or the first command */
            if (data[0] == TLS_HANDSHAKE || stream->command_bytes) {
                part = collect(stream, RECORD_HEADER_BYTES, data, size);
                if (stream->command_bytes == RECORD_HEADER_BYTES) {
                    stream->to_take = (uint64_t)stream->command[3] << 8 | stream->command[4];
                    stream->command_bytes = 0;
                    stream->app_state = APP_HELLO;
                }
            } else {
                part = 0;
                stream->app_state = APP_COMMAND;
            }
            break;
        case APP_HELLO:
        case APP_EXCHANGE:
            part = stream->to_take < size ? (size_t)stream->to_take : size;
            if (!part)
                die("more than was announced");
            stream->to_take -= part;
            if (stream->app_state == APP_EXCHANGE)
                done_if_done(stream);
            else if (!stream->to_take)
                stream->app_state = APP_COMMAND;
            break;
        case APP_COMMAND:
            part = collect(stream, stream->command_bytes || *data == 'X' ? COMMAND_BYTES : 1, data, size);
            command(stream);
            break;
        case APP_ECHO:
            stream_write(stream, data, size);
            part = size;
            break;
        default:
            die("no such state");
        }
        data += part;
        size -= part;
    }
}

void app_end(struct stream *stream)
{
    stream_end(stream);
}
