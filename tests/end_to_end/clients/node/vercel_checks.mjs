// Vercel's AI SDK with `openai("...")`, its default, which speaks the Responses API.

import assert from "node:assert/strict";
import test from "node:test";
import { openai } from "@ai-sdk/openai";
import { generateObject, generateText, Output, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";

const Topic = z.object({ kind: z.enum(["list", "dict"]), urgent: z.boolean() });
const request = { model: openai("pydoc-llama"), prompt: "What is a list?", temperature: 0, maxRetries: 0 };
const lookUp = tool({ inputSchema: Topic, execute: ({ kind }) => `found ${kind}` });
// Forced at the first step alone: the small model would not call it by itself, and not stop calling it.
const loop = {
  ...request,
  tools: { lookUp },
  stopWhen: stepCountIs(2),
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : { type: "tool", toolName: "lookUp" } }),
  providerOptions: { openai: { parallelToolCalls: false } },
};

test("a text has its usage", async () => {
  const result = await generateText({ ...request, system: "Be short.", maxOutputTokens: 6 });
  assert.ok(result.text);
  assert.equal(result.finishReason, "length");
  assert.equal(result.usage.outputTokens, 6);
});

test("a stream has the text and the usage of the whole answer", async () => {
  const whole = await generateText({ ...request, maxOutputTokens: 6 });
  const result = streamText({ ...request, maxOutputTokens: 6 });
  const deltas = [];
  for await (const delta of result.textStream) deltas.push(delta);
  assert.ok(deltas.length > 1);
  assert.equal(deltas.join(""), whole.text);
  assert.equal(await result.finishReason, "length");
  assert.equal((await result.usage).outputTokens, 6);
});

test("an object has its schema", async () => {
  Topic.parse((await generateObject({ ...request, schema: Topic })).object);
});

test("an object is a text's output", async () => {
  Topic.parse((await generateText({ ...request, output: Output.object({ schema: Topic }) })).output);
});

test("a streamed object has its schema", async () => {
  const result = streamObject({ ...request, schema: Topic });
  const partials = [];
  for await (const partial of result.partialObjectStream) partials.push(partial);
  Topic.parse(await result.object);
  assert.deepEqual(partials.at(-1), await result.object);
});

test("a tool is called and its result answered", async () => {
  const result = await generateText(loop);
  assertCalledThenAnswered(result.steps);
});

test("a streamed answer calls a tool and goes on", async () => {
  const result = streamText(loop);
  await result.consumeStream();
  assertCalledThenAnswered(await result.steps);
});

test("a second turn without a store has the first one's text", async () => {
  const again = await secondTurn({ openai: { store: false } });
  assert.ok(again.text);
});

test("a second turn that refers to a stored text is refused", async () => {
  await assert.rejects(secondTurn({}), { statusCode: 400, message: /item_reference/ });
});

async function secondTurn(providerOptions) {
  const { prompt, ...rest } = request;
  const first = await generateText(request);
  const question = { role: "user", content: prompt };
  const messages = [question, ...first.response.messages, { role: "user", content: "And a dict?" }];
  return await generateText({ ...rest, messages, providerOptions });
}

function assertCalledThenAnswered([called, answered]) {
  const [{ output }] = called.toolResults;
  assert.match(output, /^found (list|dict)$/);
  assert.equal(called.finishReason, "tool-calls");
  assert.equal(answered.toolCalls.length, 0);
  assert.ok(answered.text);
}
