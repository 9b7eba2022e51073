// Anthropic's own library for JavaScript.

import assert from "node:assert/strict";
import test from "node:test";
import Anthropic from "@anthropic-ai/sdk";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import { z } from "zod";

const client = new Anthropic({ maxRetries: 0 });
const messages = [{ role: "user", content: "What is a list?" }];
const request = { model: "pydoc-llama", messages, temperature: 0, max_tokens: 6 };
const Topic = z.object({ kind: z.enum(["list", "dict"]), urgent: z.boolean() });
const tool = { name: "look_up", description: "Look a kind up.", input_schema: z.toJSONSchema(Topic) };

test("a stream's events are in order and have the whole message's text", async () => {
  const whole = await client.messages.create(request);
  assert.equal(whole.stop_reason, "max_tokens");
  const events = [];
  for await (const event of await client.messages.create({ ...request, stream: true })) events.push(event);
  const deltas = events.filter((event) => event.type === "content_block_delta");
  assert.ok(deltas.length > 1);
  assert.equal(deltas.map((event) => event.delta.text).join(""), whole.content[0].text);
  assert.deepEqual(events.map((event) => event.type).filter((type) => type !== "content_block_delta"), [
    "message_start",
    "content_block_start",
    "content_block_stop",
    "message_delta",
    "message_stop",
  ]);
  assert.equal(events.at(-2).usage.output_tokens, 6);
});

test("a text is parsed into a zod type", async () => {
  const format = zodOutputFormat(Topic);
  const parsed = await client.messages.parse({ ...request, max_tokens: 64, output_config: { format } });
  Topic.parse(parsed.parsed_output);
});

test("a tool is called in three turns, streamed", async () => {
  const turns = [...messages];
  const forced = { tools: [tool], tool_choice: { type: "any", disable_parallel_tool_use: true }, max_tokens: 64 };
  for (let turn = 0; turn < 3; turn++) {
    const answer = await client.messages.stream({ ...request, ...forced, messages: turns }).finalMessage();
    assert.equal(answer.stop_reason, "tool_use");
    const [call] = answer.content;
    Topic.parse(call.input);
    const result = { type: "tool_result", tool_use_id: call.id, content: "found" };
    turns.push({ role: "assistant", content: answer.content }, { role: "user", content: [result] });
  }
  const counted = await client.messages.countTokens({ model: request.model, tools: [tool], messages: turns });
  const { usage } = await client.messages.create({ ...request, tools: [tool], messages: turns });
  assert.equal(counted.input_tokens, usage.input_tokens + usage.cache_read_input_tokens);
});

test("the next request is answered after one that was aborted", async () => {
  const stream = client.messages.stream({ ...request, max_tokens: 64 });
  await assert.rejects(async () => {
    for await (const event of stream) if (event.type === "content_block_delta") stream.abort();
  }, Anthropic.APIUserAbortError);
  assert.equal((await client.messages.create({ ...request, max_tokens: 1 })).usage.output_tokens, 1);
});

test("errors are the library's own", async () => {
  await assert.rejects(client.messages.create({ ...request, model: "claude-opus-4-5" }), Anthropic.NotFoundError);
  await assert.rejects(client.messages.create({ ...request, temperature: 2 }), Anthropic.BadRequestError);
});
