// OpenAI's own library for JavaScript: the Responses API, and a chat.

import assert from "node:assert/strict";
import test from "node:test";
import OpenAI from "openai";
import { zodResponsesFunction, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const client = new OpenAI({ maxRetries: 0 });
const request = { model: "pydoc-llama", input: "What is a list?", temperature: 0 };
const Topic = z.object({ kind: z.enum(["list", "dict"]), urgent: z.boolean() });
const lookUp = zodResponsesFunction({ name: "look_up", parameters: Topic });

test("a response has a text and its usage", async () => {
  const response = await client.responses.create({ ...request, instructions: "Be short.", max_output_tokens: 6 });
  assert.ok(response.output_text);
  assert.equal(response.status, "incomplete");
  assert.equal(response.incomplete_details.reason, "max_output_tokens");
  assert.equal(response.usage.output_tokens, 6);
  assert.equal(response.usage.total_tokens, response.usage.input_tokens + 6);
});

test("a stream's events are in order and have the whole response's text", async () => {
  const short = { ...request, max_output_tokens: 6 };
  const whole = await client.responses.create(short);
  const events = [];
  for await (const event of await client.responses.create({ ...short, stream: true })) events.push(event);
  assert.deepEqual(events.map((event) => event.sequence_number), [...events.keys()]);
  const deltas = events.filter((event) => event.type === "response.output_text.delta");
  assert.ok(deltas.length > 1);
  assert.equal(deltas.map((event) => event.delta).join(""), whole.output_text);
  assert.deepEqual(events.map((event) => event.type).filter((type) => type !== "response.output_text.delta"), [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.incomplete",
  ]);
  assert.equal(events.at(-1).response.usage.output_tokens, 6);
});

test("a text is parsed into a zod type", async () => {
  const response = await client.responses.parse({ ...request, text: { format: zodTextFormat(Topic, "topic") } });
  Topic.parse(response.output_parsed);
});

test("a streamed text is parsed into a zod type", async () => {
  const stream = client.responses.stream({ ...request, text: { format: zodTextFormat(Topic, "topic") } });
  Topic.parse((await stream.finalResponse()).output_parsed);
});

test("a required function is called and its result answered", async () => {
  const tools = { tools: [lookUp], parallel_tool_calls: false };
  const called = await client.responses.parse({ ...request, ...tools, tool_choice: "required" });
  await answer(called, tools);
});

test("a named function's call is streamed and its result answered", async () => {
  const tools = { tools: [lookUp], parallel_tool_calls: false };
  const choice = { type: "function", name: "look_up" };
  const stream = client.responses.stream({ ...request, ...tools, tool_choice: choice });
  let streamed = "";
  stream.on("response.function_call_arguments.delta", (event) => (streamed += event.delta));
  const called = await stream.finalResponse();
  assert.equal(streamed, called.output[0].arguments);
  await answer(called, tools);
});

test("the next request is answered after one that was aborted", async () => {
  const stream = await client.responses.create({ ...request, stream: true });
  for await (const event of stream) if (event.type === "response.output_text.delta") stream.controller.abort();
  const response = await client.responses.create({ ...request, max_output_tokens: 1 });
  assert.equal(response.usage.output_tokens, 1);
});

test("what needs a stored response is refused by name", async () => {
  const refused = client.responses.create({ ...request, previous_response_id: "resp_1" });
  await assert.rejects(refused, (error) => error instanceof OpenAI.BadRequestError && error.param === "previous_response_id");
});

test("a chat and its stream have the same text", async () => {
  const chat = { model: "pydoc-llama", messages: [{ role: "user", content: request.input }], temperature: 0, max_tokens: 6 };
  const whole = await client.chat.completions.create(chat);
  const streamed = await client.chat.completions.stream(chat).finalChatCompletion();
  assert.ok(whole.choices[0].message.content);
  assert.equal(streamed.choices[0].message.content, whole.choices[0].message.content);
});

async function answer(called, tools) {
  const [call] = called.output;
  assert.equal(call.name, "look_up");
  Topic.parse(call.parsed_arguments);
  const result = { type: "function_call_output", call_id: call.call_id, output: "found" };
  const input = [{ role: "user", content: request.input }, ...called.output, result];
  const after = await client.responses.create({ ...request, ...tools, input, tool_choice: "none", max_output_tokens: 8 });
  assert.ok(after.output_text);
}
