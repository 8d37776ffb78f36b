// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package clusterclient

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/spf13/pflag"
	"github.com/vishvananda/netns"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/discovery/cached/memory"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/restmapper"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/util/jsonpath"
)

// query is a `kubectl get RESOURCE [NAME] -o jsonpath=TEMPLATE`.
type query struct {
	namespace, resource, name, template string
	selectors                           metav1.ListOptions
}

// parseQuery parses arguments of kubectl, and reports whether they have the form of a query.
func parseQuery(args []string) (query, bool) {
	var output string
	q := query{namespace: metav1.NamespaceDefault}
	flags := pflag.NewFlagSet("get", pflag.ContinueOnError)
	flags.StringVarP(&q.namespace, "namespace", "n", q.namespace, "")
	flags.StringVarP(&output, "output", "o", "", "")
	flags.StringVarP(&q.selectors.LabelSelector, "selector", "l", "", "")
	flags.StringVar(&q.selectors.FieldSelector, "field-selector", "", "")
	all := flags.BoolP("all-namespaces", "A", false, "")
	if err := flags.Parse(args); err != nil {
		return q, false
	}
	if *all {
		q.namespace = metav1.NamespaceAll
	}
	var hasTemplate bool
	q.template, hasTemplate = strings.CutPrefix(output, "jsonpath=")
	words := flags.Args()
	if !hasTemplate || len(words) < 2 || len(words) > 3 || words[0] != "get" || strings.ContainsAny(words[1], ",/") {
		return q, false
	}
	q.resource = words[1]
	if len(words) == 3 {
		q.name = words[2]
	}
	return q, true
}

// query answers a query without kubectl, which takes 0.2 s of processor time to start. On a cluster that tests poll,
// that was a quarter of the time of all processes.
func (c *Cluster) query(ctx context.Context, q query) (string, error) {
	c.lock.Lock()
	client := c.queries
	c.lock.Unlock()
	if client == nil {
		var err error
		if client, err = c.newQueryClient(); err != nil {
			return "", err
		}
	}
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	out, err := client.run(ctx, q)
	if err != nil {
		client = nil // the cluster may have been started again, and serve other resources
	}
	c.lock.Lock()
	defer c.lock.Unlock()
	c.queries = client
	return out, err
}

// IsQuery reports whether Cluster.Kubectl answers kubectl's arguments itself.
func IsQuery(args []string) bool {
	_, ok := parseQuery(args)
	return ok
}

// queryClient answers queries of one API server.
type queryClient struct {
	objects dynamic.Interface
	mapper  meta.RESTMapper
}

// newQueryClient returns a client that connects from the network namespace of the cluster.
func (c *Cluster) newQueryClient() (*queryClient, error) {
	config, err := clientcmd.BuildConfigFromFlags("", filepath.Join(c.Dir, "kubeconfig"))
	if err != nil {
		return nil, err
	}
	config.Dial = c.dial
	config.QPS = -1 // the tests poll
	config.WarningHandler = rest.NoWarnings{}
	served, err := discovery.NewDiscoveryClientForConfig(config)
	if err != nil {
		return nil, err
	}
	objects, err := dynamic.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	cached := memory.NewMemCacheClient(served)
	mapper := restmapper.NewDeferredDiscoveryRESTMapper(cached)
	return &queryClient{objects, restmapper.NewShortcutExpander(mapper, cached, nil)}, nil
}

// dial connects from the network namespace of the cluster.
func (c *Cluster) dial(ctx context.Context, network, address string) (net.Conn, error) {
	pid, err := os.ReadFile(filepath.Join(c.Dir, "init.pid"))
	if err != nil {
		return nil, err
	}
	namespace, err := netns.GetFromPath(fmt.Sprintf("/proc/%s/ns/net", strings.TrimSpace(string(pid))))
	if err != nil {
		return nil, err
	}
	defer namespace.Close()
	type result struct {
		conn net.Conn
		err  error
	}
	dialed := make(chan result, 1)
	go func() {
		runtime.LockOSThread() // and never unlock: the thread ends with the goroutine
		if err := netns.Set(namespace); err != nil {
			dialed <- result{err: err}
			return
		}
		conn, err := new(net.Dialer).DialContext(ctx, network, address)
		dialed <- result{conn, err}
	}()
	r := <-dialed
	return r.conn, r.err
}

// resource returns the resource that an argument names: pods, deployments.apps, or deployments.v1.apps.
func (c *queryClient) resource(arg string) (schema.GroupVersionResource, error) {
	withVersion, group := schema.ParseResourceArg(arg)
	if withVersion != nil {
		if found, err := c.mapper.ResourceFor(*withVersion); err == nil {
			return found, nil
		}
	}
	return c.mapper.ResourceFor(group.WithVersion(""))
}

// run returns what kubectl would print.
func (c *queryClient) run(ctx context.Context, q query) (string, error) {
	full, err := c.resource(q.resource)
	if err != nil {
		return "", err
	}
	kind, err := c.mapper.KindFor(full)
	if err != nil {
		return "", err
	}
	mapping, err := c.mapper.RESTMapping(kind.GroupKind(), kind.Version)
	if err != nil {
		return "", err
	}
	var objects dynamic.ResourceInterface = c.objects.Resource(full)
	if mapping.Scope.Name() == meta.RESTScopeNameNamespace {
		objects = c.objects.Resource(full).Namespace(q.namespace)
	}
	content, err := fetch(ctx, objects, q)
	if err != nil {
		return "", err
	}
	template := jsonpath.New("query").AllowMissingKeys(true)
	if err := template.Parse(q.template); err != nil {
		return "", fmt.Errorf("parse the JSONPath of a query: %w", err)
	}
	var out bytes.Buffer
	err = template.Execute(&out, content)
	return out.String(), err
}

// fetch returns the content of the object or of the list that q names.
func fetch(ctx context.Context, objects dynamic.ResourceInterface, q query) (map[string]any, error) {
	if q.name != "" {
		object, err := objects.Get(ctx, q.name, metav1.GetOptions{})
		if err != nil {
			return nil, err
		}
		return object.Object, nil
	}
	list, err := objects.List(ctx, q.selectors)
	if err != nil {
		return nil, err
	}
	return list.UnstructuredContent(), nil
}
